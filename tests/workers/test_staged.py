"""A prefill worker in stages: to everybody else a worker like any other, whatever happens to a prompt or to a stage."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

from conductor.core.events import HandoverFinished, RequestFailed, RequestFinished
from conductor.core.types import FinishReason
from models.base import ForwardBatch
from models.load import load_model
from tests.models.builders import write_tiny_folder
from tests.models.test_windows import write_windowed
from tests.workers.actor_doubles import Cluster, make_job, place, until
from tests.workers.doubles import BLOCK_TOKENS, generate, make_engine, make_prompt
from tests.workers.staged_doubles import Group
from workers.staged import CHUNKS_PER_STAGE

PROMPT = tuple((7 * i) % 91 + 2 for i in range(57))
OTHER = tuple((5 * i) % 83 + 2 for i in range(41))


@pytest.fixture
def model(tmp_path: Path) -> Any:
    """Three layers; its folder is `tmp_path`."""
    write_tiny_folder(tmp_path, "qwen3", head_dim=16)
    return load_model(str(tmp_path)).model


def expected(model: Any, prompt: tuple[int, ...] = PROMPT, count: int = 8) -> list[int]:
    return generate(make_engine(64, BLOCK_TOKENS, model), make_prompt(prompt, count), count)


async def grouped(cluster: Cluster, folder: Path, model: Any, stages: int) -> Group:
    """`p0` in stages, `p1` and `d0` in one piece."""
    group = Group(cluster.fabric, folder, stages)
    await cluster.add("p0", build=group)
    await cluster.add("p1", model=model)
    await cluster.add("d0", model=model)
    return group


async def run(cluster: Cluster, name: str, prompt: tuple[int, ...] = PROMPT, worker: str = "p0", **how: Any) -> Any:
    job = make_job(name, prompt)
    await cluster.submit(job, place(job, worker, "d0", **how))
    return await cluster.output_of(name)


def reused(cluster: Cluster, name: str) -> int | None:
    return min(cluster.outputs[name], key=lambda output: output.index).reused_tokens


@pytest.mark.parametrize("stages", [2, 3])
async def test_a_prompt_through_stages_is_answered_as_by_one_worker(
    cluster: Cluster, tmp_path: Path, model: Any, stages: int
) -> None:
    """Computed, found again, pulled from the group, and pulled to it: the same tokens, and reuse that is really had."""
    await grouped(cluster, tmp_path, model, stages)
    assert await run(cluster, "miss") == expected(model)
    assert await run(cluster, "hit") == expected(model)
    assert await run(cluster, "from", worker="p1", fetched=56, source="p0") == expected(model)
    assert await run(cluster, "other", OTHER, "p1") == expected(model, OTHER)
    assert await run(cluster, "to", OTHER, fetched=40, source="p1") == expected(model, OTHER)
    assert [reused(cluster, name) for name in ("miss", "hit", "from", "other", "to")] == [0, 56, 56, 0, 40]
    assert [event.reason for event in cluster.conductor.of(RequestFinished)] == [FinishReason.LENGTH] * 5
    assert not cluster.conductor.of(RequestFailed)


async def test_each_stage_hands_over_its_own_layers(cluster: Cluster, tmp_path: Path, model: Any) -> None:
    """A decode worker that knows nothing of the prompt gets every layer's KV once; no stage holds another's."""
    group = await grouped(cluster, tmp_path, model, 3)
    await run(cluster, "r")
    await until(lambda: bool(cluster.conductor.of(HandoverFinished)))
    (handed,) = cluster.conductor.of(HandoverFinished)
    assert handed.transfer_bytes == 15 * BLOCK_TOKENS * model.layout.bytes_per_token
    caches = [cluster.workers["p0"].cache, *(stage.stage.cache for stage in group.later)]
    assert [(list(cache.paged.held), len(cache.paged.layers)) for cache in caches] == [([0], 1), ([1], 1), ([2], 1)]


async def test_windows_pass_through_stages(cluster: Cluster, tmp_path: Path) -> None:
    """Window layers in every stage, of which only what the next token sees is handed over."""
    write_windowed(tmp_path, "gemma2")
    model = load_model(str(tmp_path)).model
    await grouped(cluster, tmp_path, model, 2)
    for name in ("miss", "hit"):
        assert await run(cluster, name) == expected(model)


async def test_chunks_flow(cluster: Cluster, tmp_path: Path, model: Any) -> None:
    """While the second stage has not begun the first chunk, the first stage computes the next ones, but not without bound."""
    group = await grouped(cluster, tmp_path, model, 2)
    (stage,) = group.later
    stage.model.computed.clear()  # of the warm-up
    stage.model.open.clear()
    answer = asyncio.create_task(run(cluster, "r"))
    worker = cluster.workers["p0"]
    ahead = (CHUNKS_PER_STAGE + 1) * 8
    await until(lambda: worker._computing is not None and worker._computing.sequence.computed == ahead)
    await asyncio.sleep(0.05)
    assert worker._computing.sequence.computed == ahead
    assert stage.model.computed == []
    stage.model.open.set()
    assert await answer == expected(model)
    assert stage.model.computed == [0, 8, 16, 24, 32, 40, 48, 56]


async def test_a_prompt_that_is_cancelled_in_the_flow(cluster: Cluster, tmp_path: Path, model: Any) -> None:
    """All of it is given back once the stages are through with it, and the blocks serve the next prompt."""
    group = await grouped(cluster, tmp_path, model, 3)
    group.later[1].model.open.clear()
    answer = asyncio.create_task(run(cluster, "gone"))
    worker = cluster.workers["p0"]
    await until(lambda: worker._computing is not None and worker._computing.sequence.computed > 8)
    await asyncio.gather(worker.cancel("gone", 1), cluster.workers["d0"].cancel("gone", 1))
    group.later[1].model.open.set()
    assert await answer == [None]
    await until(lambda: worker.cache.pinned == 0 and worker._computing is None)
    assert await run(cluster, "next", OTHER) == expected(model, OTHER)
    assert await run(cluster, "again") == expected(model)


async def test_pulls_wait_for_what_is_in_the_flow(cluster: Cluster, tmp_path: Path, model: Any) -> None:
    """KV of another worker is written when no chunk that was passed on before is left."""
    group = await grouped(cluster, tmp_path, model, 2)
    await run(cluster, "other", OTHER, "p1")
    group.later[0].model.open.clear()
    answer = asyncio.create_task(run(cluster, "r"))
    worker = cluster.workers["p0"]
    await until(lambda: worker._computing is not None and worker._computing.sequence.computed > 8)
    pulling = asyncio.create_task(worker.pull_blocks("t", cluster.handles["p1"], make_job("x", OTHER).request.block_hashes))
    await asyncio.sleep(0.05)
    assert not pulling.done()
    group.later[0].model.open.set()
    await pulling
    assert await answer == expected(model)
    assert await run(cluster, "hit", OTHER) == expected(model, OTHER)
    assert reused(cluster, "hit") == 40


async def test_the_worker_is_lost_with_a_stage(cluster: Cluster, tmp_path: Path, model: Any) -> None:
    """Whether a stage dies in idleness or cannot compute; a stage that is closed is not lost."""
    group = await grouped(cluster, tmp_path, model, 3)
    await run(cluster, "r")
    assert group.lost == []
    group.later[0].die()
    assert group.lost == ["stage 1 is gone"]


async def test_a_stage_that_cannot_compute_leaves_no_answer(cluster: Cluster, tmp_path: Path, model: Any) -> None:
    """The worker ends itself; were it to live, it would report the request as failed, and keep nothing of it."""
    group = await grouped(cluster, tmp_path, model, 2)
    group.later[0].model.broken = True
    assert await run(cluster, "r") == [None]
    await cluster.workers["d0"].cancel("r", 1)
    assert group.lost
    assert set(group.lost) == {"a stage failed to compute: out of memory"}


async def test_chunks_are_computed_in_order_however_they_come(cluster: Cluster, tmp_path: Path, model: Any) -> None:
    """A call that starts too early waits for the one before it."""
    group = await grouped(cluster, tmp_path, model, 2)
    (stage,) = group.later
    number, before = stage.stage._next, len(stage.model.computed)
    hidden = torch.zeros(4, 64)
    batches = [ForwardBatch(torch.zeros(4, dtype=torch.long), [4], [4 * n], [[0, 1]]) for n in range(2)]
    early, _ = stage.forward(number + 1, batches[1], hidden)
    stage.forward(number, batches[0], hidden)
    await asyncio.wrap_future(early)
    assert stage.model.computed[before:] == [0, 4]
