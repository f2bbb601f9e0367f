"""Writes of one turn of the event loop leave together, in order, and never more than a bound waits."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from conductor.gateway.gathering import MAX_GATHERED_BYTES, GatheringTransport


class Recorder(asyncio.Transport):
    """What really reaches the connection."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[bytes] = []
        self.ended = ""

    def write(self, data: Any) -> None:
        self.sent.append(bytes(data))

    def close(self) -> None:
        self.ended = "closed"

    def abort(self) -> None:
        self.ended = "aborted"

    def get_write_buffer_size(self) -> int:
        return 3


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


async def gathering(recorder: Recorder) -> GatheringTransport:
    return GatheringTransport(recorder, asyncio.get_running_loop())


async def test_writes_of_one_turn_are_one(recorder: Recorder) -> None:
    transport = await gathering(recorder)
    transport.write(b"head ")
    transport.write(bytearray(b"body"))
    assert (recorder.sent, transport.get_write_buffer_size()) == ([], 3 + len(b"head body"))
    await asyncio.sleep(0)
    transport.write(b"more")
    await asyncio.sleep(0)
    assert recorder.sent == [b"head body", b"more"]


async def test_more_than_the_bound_waits_for_no_turn(recorder: Recorder) -> None:
    transport = await gathering(recorder)
    transport.write(b"x")
    transport.write(b"y" * MAX_GATHERED_BYTES)
    transport.write(b"z")
    assert [len(data) for data in recorder.sent] == [MAX_GATHERED_BYTES + 1]
    await asyncio.sleep(0)
    assert recorder.sent[1:] == [b"z"]


async def test_a_close_sends_what_was_written_and_an_abort_does_not(recorder: Recorder) -> None:
    transport = await gathering(recorder)
    transport.write(b"last")
    transport.close()
    assert (recorder.sent, recorder.ended) == ([b"last"], "closed")
    transport.write(b"lost")
    transport.abort()
    await asyncio.sleep(0)
    assert (recorder.sent, recorder.ended) == ([b"last"], "aborted")
