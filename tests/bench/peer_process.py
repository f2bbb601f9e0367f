"""A peer that measures itself: a process of its own Python, which is asked for one round of rates at a time.

It is started with its task as JSON and says `READY` when it has loaded, for that would disturb what others measure. Then it
reads a line of JSON for each round, and answers with a line that begins with `RATES `; whatever else its libraries print is
passed over. Between rounds it waits, so that rounds of several can take turns.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO

READY, ANSWER = "READY", "RATES "
END_S = 60.0


@contextmanager
def peer_process(python: str, script: Path, task: Mapping[str, object]) -> Iterator[PeerProcess]:
    with tempfile.TemporaryFile("w+") as errors:
        command = [python, str(script), json.dumps(task)]
        pipe = subprocess.PIPE
        process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=errors, text=True)
        try:
            peer = PeerProcess(script.name, process, errors)
            peer.answer(READY)
            yield peer
        finally:
            _end(process)


def _end(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    try:
        process.stdin.close()
        process.wait(END_S)
    except (OSError, subprocess.TimeoutExpired):
        process.kill()
        process.wait()
    assert process.stdout is not None
    process.stdout.close()


class PeerProcess:
    def __init__(self, name: str, process: subprocess.Popen[str], errors: IO[str]) -> None:
        self._name = name
        self._process = process
        self._errors = errors

    def rates(self, *, long: bool) -> dict[str, float]:
        """One round; `long`: with what takes long. Raises `RuntimeError` with the peer's last words when it is gone."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"long": long}) + "\n")
            self._process.stdin.flush()
        except OSError as error:
            raise self._gone() from error
        found: dict[str, float] = json.loads(self.answer(ANSWER))
        return found

    def answer(self, beginning: str) -> str:
        """The rest of the next line that begins so."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(beginning):
                return line.removeprefix(beginning)
        raise self._gone()

    def _gone(self) -> RuntimeError:
        self._process.wait(END_S)
        self._errors.seek(0)
        return RuntimeError(f"{self._name} failed: {(self._errors.read().strip().splitlines() or ['no message'])[-1]}")
