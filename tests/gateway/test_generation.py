"""A request in flight is ended exactly once, whatever ends it."""

from __future__ import annotations

import asyncio

import pytest

from conductor.core.types import SLO
from conductor.gateway.assembler import Delta
from conductor.gateway.errors import ApiError
from conductor.gateway.generation import Run
from conductor.gateway.hints import Hints
from conductor.gateway.plan import Origin, Planner
from conductor.gateway.schemas import CompletionBody
from conductor.gateway.settings import GatewaySettings
from conductor.metrics import GatewayMetrics
from tests.doubles.scripted_engine import Script, ScriptedEngine
from tests.gateway.conftest import MODEL, served_model


def run_of(engine: ScriptedEngine, **fields: object) -> Run:
    served = served_model()
    body = CompletionBody.model_validate({"model": MODEL, "prompt": "x", **fields})
    origin = Origin(Hints(SLO()), "default", engine.channel)
    plan = Planner(served, GatewaySettings()).plan("r", body, [[1, 2]], origin)
    return Run(plan, engine, served.tokenizer, GatewayMetrics())


async def ignore(index: int, delta: Delta) -> None:
    """A client that takes everything."""


async def test_a_stop_string_frees_the_cluster_before_the_answer_is_sent() -> None:
    """And closing later does not cancel again."""
    engine = ScriptedEngine(Script(tokens=tuple(b"a#b")))
    run = run_of(engine, stop="#")
    await run.submit()
    await run.follow(ignore)
    assert engine.cancelled == ["r"]
    await run.close()
    assert engine.cancelled == ["r"]


async def test_several_choices_that_end_by_themselves_cancel_nothing() -> None:
    engine = ScriptedEngine(Script(tokens=tuple(b"ab")))
    run = run_of(engine, n=2)
    await run.submit()
    await run.follow(ignore)
    await run.close()
    assert (engine.cancelled, run.output_tokens) == ([], 4)


async def test_a_task_that_is_cancelled_cancels_in_the_cluster() -> None:
    engine = ScriptedEngine(Script(hold_after=1))
    run = run_of(engine)
    await run.submit()
    following = asyncio.ensure_future(run.follow(ignore))
    await asyncio.sleep(0)
    following.cancel()
    with pytest.raises(asyncio.CancelledError):
        await following
    await run.close()
    assert engine.cancelled == ["r"]


async def test_an_output_that_ends_without_a_reason_is_an_error() -> None:
    """A cluster that falls silent must not look like a finished answer."""
    engine = ScriptedEngine(Script(tokens=()))
    run = run_of(engine)
    await run.submit()
    with pytest.raises(ApiError) as problem:
        await run.follow(ignore)
    assert (problem.value.status, problem.value.code) == (503, "engine_unavailable")
    assert engine.cancelled == ["r"]
