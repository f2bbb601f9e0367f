"""Workers killed while blocks are on their way between them, on real Ray actors over a slow link. Whoever is left computes what
did not come, or says that it did not, and holds no block, lease or memory for the dead.

Each death costs the cast one member; the tests go on with who is left. What a decode worker's or a prefill worker's death means
for a hand-over that its peer has begun is in `test_live.py`, a death in the middle of a restore in `test_live_tiers.py`.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import pytest_asyncio

from conductor.core.events import Event, RequestFailed, TransferFailed
from conductor.core.messages import TokenOutput
from conductor.core.types import SHARED_STORE, Tier
from tests.live.chain_workers import ChainDecode, ChainPrefill
from tests.workers.actor_doubles import make_job, place, worker_config
from tests.workers.doubles import expected_output
from tests.workers.test_live import Conductor, collect, until, until_nothing_is_held
from tests.workers.worker_stage import OTHER, PROMPT
from workers.kv_store.settings import StoreSettings
from workers.kv_store.shared_memory import MEMORY_ROOT
from workers.kv_transfer.throttled import LinkLimit

pytestmark = [pytest.mark.live, pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]
NAMES = ("p0", "p1", "p2", "d0", "d1")
SLOW = LinkLimit(latency_ms=1000)
LEASE_S = 4.0
REUSED, OTHERS = 24, 12  # tokens of whole blocks in PROMPT and OTHER


class Cast:
    """The workers that live, and what they have answered."""

    def __init__(self, ray: Any, directory: Path, link: LinkLimit = SLOW, lease_s: float = LEASE_S, **where: Any) -> None:
        self._ray, self._link, self._lease_s = ray, link, lease_s
        self.store = StoreSettings(
            deployment=f"losses-{uuid4().hex}",
            host_bytes=1 << 20,
            shared_paths=(str(directory / "shared"),),
            shared_bytes=1 << 20,
            report_interval_s=0.05,
        )
        self.workers: dict[str, Any] = {}
        self.outputs: list[TokenOutput] = []
        self.readers: list[asyncio.Task[None]] = []
        self.conductor = ray.remote(Conductor).options(num_cpus=0, **where).remote()

    async def start(self, name: str, **where: Any) -> None:
        kind = ChainPrefill if name.startswith("p") else ChainDecode
        config = worker_config(name, transport="cma", link=self._link, lease_s=self._lease_s, store=self.store)
        worker = self._ray.remote(kind).options(num_cpus=0, max_concurrency=100, **where).remote(config)
        await worker.attach.remote(self.conductor, 1)
        self.workers[name] = worker
        self.readers.append(asyncio.create_task(collect(worker, self.outputs)))

    async def begin(self, request_id: str, tokens: tuple[int, ...], prefill: str, decode: str = "d0", **reuse: Any) -> None:
        job = make_job(request_id, tokens)
        placement = place(job, prefill, decode, **reuse)
        source = self.workers.get(reuse.get("relay") or reuse.get("source", ""))
        await self.workers[prefill].prefill.remote(job, placement, self.workers[decode], source)

    async def answer(self, request_id: str, tokens: tuple[int, ...]) -> int | None:
        """Reused tokens of an answer, which must be the right one."""

        async def ended() -> bool:
            return any(o.request_id == request_id and o.finish_reason for o in self.outputs)

        await until(ended)
        outputs = sorted((o for o in self.outputs if o.request_id == request_id), key=lambda o: o.index)
        assert [output.token_id for output in outputs] == expected_output(tokens, 8)
        return outputs[0].reused_tokens

    async def shows(self, name: str, figure: str, count: int) -> None:
        """Wait until so much is under way at a worker."""

        async def under_way() -> bool:
            return bool((await self.workers[name].stats.remote())[figure] >= count)

        await until(under_way)

    async def kill_when(self, name: str, figure: str, count: int, of: str | None = None) -> None:
        """SIGKILL once a worker, or another one, shows that so much is under way."""
        pid = (await self.workers[name].stats.remote())["pid"]
        await self.shows(of or name, figure, count)
        os.kill(pid, signal.SIGKILL)
        del self.workers[name]

    async def told(self, kind: type[Event]) -> list[Any]:
        return [event for event in await self.conductor.told.remote() if isinstance(event, kind)]

    async def nothing_is_left_of_it(self) -> None:
        """No block, lease or transfer is held by anybody, and their host has the one directory of shared memory."""
        for worker in self.workers.values():
            stats = await until_nothing_is_held(worker)
            assert stats["num_blocks"] == stats["free_blocks"] + stats["cached_idle_blocks"]
        assert len(self.memory()) == 1

    async def leave(self) -> None:
        """Whoever still lives ends in good order, and the memory of their host is gone."""
        for reader in self.readers:
            reader.cancel()
        await asyncio.gather(*self.readers, return_exceptions=True)  # those of the dead have failed
        for worker in self.workers.values():
            await worker.close.remote()
            self._ray.kill(worker)
        assert self.memory() == []

    def memory(self) -> list[Path]:
        return list(MEMORY_ROOT.glob(f"kv-conductor-*/{self.store.deployment}*"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cast(local_ray: Any, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cast]:
    """`p0` has computed both prompts, and the shared store has them."""
    cast = Cast(local_ray, tmp_path_factory.mktemp("losses"))
    await asyncio.gather(*(cast.start(name) for name in NAMES))
    await asyncio.gather(cast.begin("first", PROMPT, "p0"), cast.begin("second", OTHER, "p0"))
    assert (await cast.answer("first", PROMPT), await cast.answer("second", OTHER)) == (0, 0)

    async def stored() -> bool:
        reports = (await cast.workers["p0"].stats.remote())["tiers"]
        return any(report["tier"] is Tier.SHARED and report["stored"] >= (REUSED + OTHERS) // 4 for report in reports)

    await until(stored)
    await cast.nothing_is_left_of_it()
    yield cast
    await cast.leave()


async def test_a_source_that_dies_costs_its_pull_and_its_copy(cast: Cast) -> None:
    """A request's pull and a replication are under way from it: the prompt is computed, the copy is told to have failed."""
    hashes = make_job("r", PROMPT).request.block_hashes
    await cast.begin("pulled", PROMPT, "p1", fetched=REUSED, source="p0")
    copying = cast.workers["p2"].pull_blocks.remote("copy-1", cast.workers["p0"], hashes)
    await cast.kill_when("p0", "offers", 2)
    assert await cast.answer("pulled", PROMPT) == 0
    await copying

    async def told() -> bool:
        return [event.transfer_id for event in await cast.told(TransferFailed)] == ["copy-1"]

    await until(told)
    await cast.nothing_is_left_of_it()


async def test_a_target_that_dies_holds_nothing_for_long(cast: Cast) -> None:
    """Its source pins for a pull and a copy until the lease is over, and serves the next one."""
    hashes = make_job("r", PROMPT).request.block_hashes
    await cast.begin("lost", PROMPT, "p2", fetched=REUSED, source="p1")
    cast.workers["p2"].pull_blocks.remote("copy-2", cast.workers["p1"], hashes)
    await cast.kill_when("p2", "offers", 2, of="p1")
    await cast.nothing_is_left_of_it()
    await cast.begin("again", PROMPT, "p1")
    assert await cast.answer("again", PROMPT) == REUSED


async def test_a_relay_that_dies_leaves_the_read_to_its_target(cast: Cast) -> None:
    """The prefix comes from the shared store all the same."""
    relayed: dict[str, Any] = {"fetched": OTHERS, "source": SHARED_STORE, "tier": Tier.SHARED, "relay": "d1"}
    await cast.begin("relayed", OTHER, "p1", **relayed)
    await cast.kill_when("d1", "offers", 1)
    assert await cast.answer("relayed", OTHER) == OTHERS
    assert (await cast.workers["p1"].stats.remote())["failed_relays"] == 1
    await cast.nothing_is_left_of_it()


async def test_a_decode_worker_that_dies_in_mid_hand_over_is_blamed(cast: Cast) -> None:
    """Room is reserved and parts are on their way; the prefill worker lets go of all of them."""
    await cast.begin("torn", OTHER[::-1] + PROMPT, "p1")
    await cast.kill_when("d0", "pinned_blocks", 1)

    async def told() -> bool:
        return [(event.request_id, event.worker_id) for event in await cast.told(RequestFailed)] == [("torn", "d0")]

    await until(told)
    await cast.nothing_is_left_of_it()
