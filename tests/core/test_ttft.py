"""Time to first token where it waits for the hand-over, and where it does not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from conductor.core.config import SchedulerConfig
from conductor.core.events import WorkerJoined
from conductor.core.types import Role
from tests.core.builders import PROFILE, Drive, blocks, cluster, drive, request, worker

SERIAL = replace(PROFILE, first_token_after_handover=True, handover_overlaps_prefill=False)
SEND_S = 640 * 100_000 / 1e10
STEP_S = 0.01 + 0.001 + 640 * 1e-7


def test_a_first_token_from_the_prefill_worker_waits_for_no_handover(scheduler: Drive) -> None:
    """Without the flag the estimate ends with the prefill."""
    estimate = scheduler.place(request()).ttft
    assert (estimate.transfer_s, estimate.handover_s) == (0.0, 0.0)


def test_a_first_token_from_the_decode_worker_waits_for_handover_and_one_step() -> None:
    """The whole prompt's KV travels after the prefill; then the decode worker makes one step."""
    estimate = drive(joins=cluster(profile=SERIAL)).place(request()).ttft
    assert pytest.approx(SEND_S + STEP_S) == estimate.transfer_s
    assert estimate.transfer_s == estimate.handover_s


def test_the_handover_widens_the_interval_with_the_rest() -> None:
    """Both ends of the interval contain the hand-over."""
    plain = drive(joins=cluster()).place(request()).ttft
    waits = drive(joins=cluster(profile=SERIAL)).place(request()).ttft
    assert waits.low_s - plain.low_s == pytest.approx(SEND_S + STEP_S)
    assert waits.high_s - plain.high_s == pytest.approx(SEND_S + STEP_S)


def test_a_streamed_handover_adds_only_what_the_prefill_does_not_hide() -> None:
    """Of a short hand-over beside a long prefill, one layer group is left at the end."""
    streamed = replace(SERIAL, handover_overlaps_prefill=True, layer_groups=8)
    estimate = drive(joins=cluster(profile=streamed)).place(request()).ttft
    assert estimate.handover_s == pytest.approx(SEND_S / 8 + STEP_S)


def test_a_slow_network_card_bounds_the_handover() -> None:
    """The slower of card and link counts."""
    estimate = drive(joins=cluster(profile=SERIAL, nic_bytes_per_s=1e9)).place(request()).ttft
    assert estimate.handover_s == pytest.approx(10 * SEND_S + STEP_S)


def test_the_handover_keeps_no_prefill_worker_busy() -> None:
    """The next request in line waits for the prefill alone."""
    driven = drive(joins=cluster(prefill=1, profile=SERIAL))
    first = driven.place(request("r1"))
    assert driven.place(request("r2")).ttft.queue_s == pytest.approx(first.ttft.prefill_s)


def test_a_coupled_engine_hands_nothing_over() -> None:
    """It sends the first token where it was computed."""
    joined = WorkerJoined(worker("c0", Role.COUPLED, profile=SERIAL), epoch=1)
    assert drive(joins=[joined]).place(request()).ttft.handover_s == 0.0


@pytest.mark.parametrize("policy", ["conductor", "kvcache_centric", "round_robin", "least_loaded"])
def test_every_policy_reports_the_handover(policy: str) -> None:
    """The estimate does not depend on who chose."""
    driven = drive(SchedulerConfig(policy=policy), cluster(profile=SERIAL))
    assert driven.place(request()).ttft.handover_s == pytest.approx(SEND_S + STEP_S)


@pytest.mark.parametrize("groups", [1, 4])
def test_a_pull_hides_behind_the_compute_layer_group_by_layer_group(groups: int) -> None:
    """With G groups of T and P seconds the request pays (T + P) / G + (1 - 1 / G) max(T, P) in all."""
    profile = replace(PROFILE, layer_groups=groups, prefill_per_token_s=1e-3)
    driven = drive(SchedulerConfig(policy="conductor"), cluster(prefill=2, profile=profile))
    driven.store("p0", blocks(5, shared=5))
    driven.place(request("r0", tokens=6400, shared=5))
    placed = driven.place(request("r1", tokens=640, shared=5))
    assert (placed.prefill, placed.reuse.fetched_tokens) == ("p1", 320)
    bring_s, compute_s = 320 * 1e5 / 1e10, 0.01 + 0.320
    whole_s = (bring_s + compute_s) / groups + (1 - 1 / groups) * max(bring_s, compute_s)
    assert placed.ttft.transfer_s == pytest.approx(whole_s - compute_s)


WINDOWED = replace(PROFILE, kv_window_bytes_per_token=80_000, kv_window_tokens=128)


@pytest.mark.parametrize(("held", "moved"), [(1, 64 * 100_000), (2, 128 * 100_000), (5, 320 * 20_000 + 128 * 80_000)])
def test_a_pull_leaves_behind_what_windows_do_not_see(held: int, moved: int) -> None:
    """Of window layers the last tokens of the prefix move, of the others all."""
    slow = {"prefill_per_token_s": 1e-3, "layer_groups": 1}
    joined = WorkerJoined(worker("p9", Role.PREFILL, profile=replace(WINDOWED, **slow)), epoch=1)
    driven = drive(SchedulerConfig(policy="conductor"), [*cluster(prefill=1, profile=replace(PROFILE, **slow)), joined])
    driven.store("p0", blocks(held, shared=held))
    driven.place(request("r0", tokens=6400, shared=held))
    placed = driven.place(request("r1", tokens=640, shared=held))
    assert (placed.prefill, placed.reuse.fetched_tokens) == ("p9", 64 * held)
    assert placed.ttft.transfer_s == pytest.approx(moved / 1e10)
    assert WINDOWED.moved_bytes(64 * held) == moved


@pytest.mark.parametrize("tokens", [100, 640])
def test_a_handover_leaves_behind_what_windows_do_not_see(tokens: int) -> None:
    """The wait for the hand-over counts what travels."""
    profile = replace(SERIAL, kv_window_bytes_per_token=80_000, kv_window_tokens=128)
    estimate = drive(joins=cluster(profile=profile)).place(request(tokens=tokens)).ttft
    step_s = 0.01 + 0.001 + tokens * 1e-7
    assert estimate.handover_s == pytest.approx(WINDOWED.moved_bytes(tokens) / 1e10 + step_s)


def test_a_worker_in_stages_computes_several_chunks_at_once() -> None:
    """With 60 % of a chunk's time until the next, four chunks and a short one take that of all, and the rest of the last."""
    profile = replace(PROFILE, prefill_per_token2_s=1e-8, chunk_tokens=512, flow_share=0.6)
    whole, last = replace(profile, flow_share=1.0), 2100 - 4 * 512
    expected_s = 0.6 * whole.prefill_s(2100, 0) + 0.4 * whole.prefill_s(2100, 2100 - last)
    assert profile.prefill_s(2100, 0) == pytest.approx(expected_s)
    assert profile.prefill_s(500, 0) == whole.prefill_s(500, 0)
    slow = replace(PROFILE, prefill_per_token_s=1.0)
    joins = [*cluster(prefill=1, profile=slow), WorkerJoined(worker("p9", Role.PREFILL, profile=profile), epoch=1)]
    for tokens in (2100, 500):
        placed = drive(joins=joins).place(request(tokens=tokens))
        assert placed.prefill == "p9"
        assert placed.ttft.prefill_s == pytest.approx(profile.prefill_s(tokens, 0))


def test_a_pipeline_is_chosen_where_it_is_sooner() -> None:
    """Beside a worker that computes a chunk faster: for a prompt of many chunks, not for one of a single chunk."""
    single = replace(PROFILE, chunk_tokens=512)
    staged = replace(single, prefill_per_token_s=single.prefill_per_token_s * 1.2, flow_share=0.5)
    joins = [*cluster(prefill=1, profile=single), WorkerJoined(worker("p9", Role.PREFILL, profile=staged), epoch=1)]
    chosen = [drive(joins=joins).place(request(tokens=tokens)).prefill for tokens in (512, 8192)]
    assert chosen == ["p0", "p9"]
