"""The real scheduler over simulated workers."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conductor.core.config import SchedulerConfig
from conductor.core.events import PrefillFinished, RequestArrived, RequestFinished, RequestResumed
from conductor.core.types import Role
from tests.traces.sim_builders import options, profile, row, run
from traces.outcomes import OutcomeStatus
from traces.schema import TraceRequest
from traces.sim.results import collect
from traces.simulator import Outage, SimulationOptions

STEP_8192_S = 0.169136918
TRANSFER_S = 327_680 / 50e9  # a token

rows = st.builds(
    row,
    at_s=st.integers(0, 30).map(lambda tenths: tenths / 10),
    prompt=st.integers(1, 20_000),
    output=st.integers(1, 40),
    first_block=st.sampled_from([100, 300, 500, 700]),
    shared=st.integers(0, 4),
)
traces = st.lists(rows, min_size=1, max_size=12).map(lambda found: sorted(found, key=lambda request: request.timestamp_s))
policies = st.sampled_from(["round_robin", "random", "least_loaded", "local_cache_aware", "kvcache_centric"])


def outcomes(trace: list[TraceRequest], chosen: SimulationOptions | None = None) -> list:
    return list(collect("test", run(trace, chosen)[0]).outcomes)


def test_first_token_waits_for_prompt_transfer_and_one_decode_step() -> None:
    """6,758 tokens alone on the mock engine take what Dynamo replays for the first request of the trace."""
    cluster = profile()
    outcome = outcomes([row(0.0, 6758, output=500)])[0]
    prefill_s = cluster.service_time().prefill.step_s([(0, 6758)])
    assert prefill_s + 6758 * TRANSFER_S + 0.005861544 == pytest.approx(outcome.ttft_s, abs=1e-6)


def test_prompts_are_packed_into_one_step() -> None:
    """Two prompts of one moment share the step's 8,192 tokens; the second goes on in the next step."""
    chosen = options(prefill_workers=1)
    _, calls = run([row(0.0, 6758), row(0.0, 10_498, shared=1)], chosen)
    finished = {event.request_id: now for now, event, _ in calls if isinstance(event, PrefillFinished)}
    assert pytest.approx(finished["0000000"]) == STEP_8192_S
    assert finished["0000001"] > 2 * STEP_8192_S


def test_prompts_of_one_step_report_what_each_takes_alone() -> None:
    """A prompt that was packed teaches the cost model what a lone one does, not its share of a full step."""

    def compute_s(prompts: int) -> list[float]:
        trace = [row(0.0, 2048 + 1024 * (number % 2), first_block=100 * number) for number in range(prompts)]
        _, calls = run(trace, options(prefill_workers=1))
        return [event.compute_s for _, event, _ in calls if isinstance(event, PrefillFinished)]

    alone_s = compute_s(1)[0]
    packed_s = compute_s(3)
    assert len(packed_s) == 3
    assert packed_s[::2] == pytest.approx([alone_s, alone_s], rel=0.1)


def test_whole_blocks_are_reused_but_never_the_last_token() -> None:
    """A repeated prompt of exactly three blocks reuses two; of 1,600 tokens three."""
    chosen = options(prefill_workers=1)
    found = outcomes([row(0.0, 1536, first_block=7), row(5.0, 1536, first_block=7), row(9.0, 1600, first_block=7)], chosen)
    assert [outcome.reused_tokens for outcome in found] == [0, 1024, 1536]


def test_evicted_prefix_is_computed_again() -> None:
    """A pool of four blocks cannot keep two prompts of three."""
    chosen = options(profile(device_blocks=4), prefill_workers=1, decode_workers=1)
    found = outcomes([row(0.0, 1537 - 512, 2, 7), row(5.0, 1537, 2, 90), row(9.0, 1537 - 512, 2, 7)], chosen)
    assert [outcome.reused_tokens for outcome in found] == [0, 0, 0]


def test_decode_gaps_grow_with_the_context() -> None:
    """A request alone: TPOT is the step time of its context; the longest tenth of gaps is no shorter."""
    outcome = outcomes([row(0.0, 6758, output=500)])[0]
    assert pytest.approx(outcome.tpot_s, abs=5e-6) == 0.005866
    assert outcome.tpot_s < outcome.tbt_s < 0.00588


def test_prompt_beyond_every_pool_ends_as_rejected_after_its_attempts() -> None:
    """It is not lost, and it does not block the queue."""
    chosen = options(
        profile(device_blocks=8), scheduler=SchedulerConfig(block_tokens=512, policy="round_robin", admission="none")
    )
    found = outcomes([row(0.0, 9000), row(1.0, 600)], chosen)
    assert [outcome.status for outcome in found] == [OutcomeStatus.REJECTED, OutcomeStatus.COMPLETED]


@settings(max_examples=25)
@given(traces, policies, st.sampled_from([0.0, 0.05]), st.booleans())
def test_every_request_ends_once_and_time_never_goes_back(
    trace: list[TraceRequest], policy: str, lag_s: float, contention: bool
) -> None:
    """I1, I6: arrived = finished; events come in order of time; a request's moments are in order."""
    network = {**profile().network.model_dump(), "contention": contention}
    chosen = options(profile(network=network, device_blocks=64), policy=policy, event_lag_s=lag_s)
    simulation, calls = run(trace, chosen)
    times = [now for now, _, _ in calls]
    assert sorted(times) == times
    assert len(trace) == sum(isinstance(event, RequestArrived) for _, event, _ in calls)
    assert len(trace) == sum(isinstance(event, RequestFinished) for _, event, _ in calls)
    for record in simulation.records.values():
        assert record.arrival_s <= record.prefill_start_s < record.first_token_s <= record.finished_s
    assert simulation.cluster.jobs == {}
    for worker in simulation.cluster.workers.values():
        assert worker.cache.pinned_blocks == 0
        assert worker.decode is None or worker.decode.reserved_tokens == 0


@settings(max_examples=10)
@given(traces, policies)
def test_equal_runs_are_equal_to_the_byte(trace: list[TraceRequest], policy: str) -> None:
    """I7: same seed, same events, same commands, same result."""
    chosen = options(profile(step_variation=0.1), policy=policy)
    first, second = run(trace, chosen), run(trace, chosen)
    assert repr(first[1]) == repr(second[1])
    assert collect("test", first[0]) == collect("test", second[0])


@settings(max_examples=25)
@given(
    traces,
    policies,
    st.sampled_from(["prefill-000", "prefill-001", "decode-000", "decode-001"]),
    st.floats(0.0, 4.0),
    st.sampled_from([None, 0.3]),
)
def test_requests_survive_the_loss_of_a_node(
    trace: list[TraceRequest], policy: str, worker: str, lost_s: float, away_s: float | None
) -> None:
    """With another worker of the same kind left, every request completes; nothing stays reserved or pinned."""
    outage = Outage(worker, lost_s, None if away_s is None else lost_s + away_s)
    simulation, _ = run(trace, options(policy=policy, outages=(outage,)))
    assert all(record.finished_s is not None for record in simulation.records.values())
    for survivor in simulation.cluster.workers.values():
        assert survivor.cache.pinned_blocks == 0
        assert survivor.decode is None or survivor.decode.reserved_tokens == 0


def test_lost_decode_worker_keeps_the_tokens_already_streamed() -> None:
    """The continuation's prompt is longer by what was emitted, and its output shorter."""
    trace = [row(0.0, 1000, output=400)]
    simulation, calls = run(trace, options(outages=(Outage("decode-000", 1.0),)))
    resumed = [event.request for _, event, _ in calls if isinstance(event, RequestResumed)]
    assert len(resumed) == 1
    emitted = resumed[0].emitted_tokens
    assert 100 < emitted < 200
    assert 1000 + emitted == resumed[0].prompt_tokens
    assert simulation.records["0000000"].emitted_tokens == 400


def test_first_token_may_come_from_prefill() -> None:
    """Then TTFT excludes the hand-over, whose wait becomes the longest gap."""
    cluster = profile(first_token="prefill")
    outcome = outcomes([row(0.0, 6758, output=10)], options(cluster))[0]
    assert cluster.service_time().prefill.step_s([(0, 6758)]) == pytest.approx(outcome.ttft_s)
    assert pytest.approx(outcome.tbt_s, abs=1e-4) == 6758 * TRANSFER_S + 0.00586


def test_streamed_handover_hides_the_transfer_behind_the_prompt() -> None:
    """What is left after the prompt is the last layers of its last chunk."""
    after, streamed = (
        outcomes([row(0.0, 16_000, output=10)], options(profile(handover=how)))[0] for how in ("after_prompt", "streamed")
    )
    last_chunk_s = 7808 * TRANSFER_S
    assert 16_000 * TRANSFER_S - last_chunk_s / 8 == pytest.approx(after.ttft_s - streamed.ttft_s, abs=0.007)


def test_prompts_whose_fetched_blocks_fill_the_pool_all_finish() -> None:
    """Fetches wait for room, and what they keep never locks out the prompt whose turn it is."""
    tiers = {"shared": {"bytes_per_s": 20e9, "blocks": 10_000}}
    cluster = profile(tiers=tiers, prefill_blocks=50)
    turns = [
        row(20.0 * turn + number / 50, 9_000 + 1_000 * turn, first_block=100 * number)
        for turn in range(3)
        for number in range(12)
    ]
    simulation, _ = run(turns, options(cluster, policy="kvcache_centric", prefill_workers=1))
    outcomes = collect("t", simulation).outcomes
    assert all(outcome.status is OutcomeStatus.COMPLETED for outcome in outcomes)
    assert simulation.cluster.network.bytes_moved["shared_restore"] > 0
    pool = simulation.cluster.workers["prefill-000"].cache
    assert (pool.pinned_blocks, pool.promised_blocks) == (0, 0)


def test_late_reports_lower_the_hits_of_a_cache_aware_policy() -> None:
    """With events a minute late the scheduler still sees what it dispatched itself, but no confirmation."""
    trace = [row(number * 0.5, 4000, first_block=1000 * (number % 3)) for number in range(24)]
    prompt = collect("now", run(trace, options(policy="local_cache_aware"))[0])
    late = collect("late", run(trace, options(policy="local_cache_aware", event_lag_s=60.0))[0])
    assert len(prompt.outcomes) == sum(outcome.status is OutcomeStatus.COMPLETED for outcome in late.outcomes)
    assert sum(o.reused_tokens for o in late.outcomes) <= sum(o.reused_tokens for o in prompt.outcomes)


def test_lower_tier_gives_back_what_the_device_pool_lost() -> None:
    """Blocks are written through to DRAM; the index is told, tier by tier."""
    tiers = {"host": {"bytes_per_s": 20e9, "blocks": 100}}
    simulation, _ = run([row(0.0, 1600, first_block=7)], options(profile(tiers=tiers), prefill_workers=1))
    store = next(iter(simulation.cluster.workers["prefill-000"].tiers.values()))
    assert tuple(sorted(store.contents())) == (7, 8, 9)


def coupled(**changes: object) -> SimulationOptions:
    return replace(options(profile(first_token="prefill", **changes)), coupled_workers=1, prefill_workers=0, decode_workers=0)


def test_coupled_engine_without_chunks_stalls_decode_for_a_prompt() -> None:
    """A long prompt arrives while another request decodes: its longest gap is the whole prompt's prefill."""
    trace = [row(0.0, 600, output=300), row(0.5, 60_000, output=2)]
    whole, chunked = (outcomes(trace, coupled(chunked_prefill=chunk))[0] for chunk in (False, True))
    longest_s = profile().service_time().prefill.step_s([(0, 60_000)])
    assert longest_s / 30 < whole.tbt_s
    assert chunked.tbt_s < whole.tbt_s


def test_coupled_engine_without_prefix_caching_reuses_nothing() -> None:
    """The plain baseline computes a repeated prompt again; with caching it does not."""
    trace = [row(0.0, 1600, first_block=7), row(5.0, 1600, first_block=7)]
    plain, caching = (outcomes(trace, coupled(reuse_blocks=reuse))[1] for reuse in (False, True))
    assert (plain.reused_tokens, caching.reused_tokens) == (0, 1536)


@settings(max_examples=15)
@given(traces, st.booleans())
def test_coupled_engines_finish_everything(trace: list[TraceRequest], chunked: bool) -> None:
    """I1 and I3 where prefill and decode share an accelerator."""
    simulation, _ = run(trace, replace(coupled(chunked_prefill=chunked), coupled_workers=2))
    assert all(record.finished_s is not None for record in simulation.records.values())
    assert all(Role.COUPLED is worker.spec.role for worker in simulation.cluster.workers.values())
    assert all(worker.cache.pinned_blocks == 0 for worker in simulation.cluster.workers.values())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"speed": 0.0}, "speed is 0.0; allowed: a number above 0"),
        ({"event_lag_s": -1.0}, "event_lag_s is -1.0; allowed: a number of at least 0"),
        ({"prefill_workers": -1}, "prefill_workers is -1; allowed: an integer of at least 0"),
        ({"prefill_workers": 0}, "no worker to prefill; allowed: at least one prefill or coupled worker"),
        ({"decode_workers": 0}, "no worker to decode; allowed: at least one decode or coupled worker"),
    ],
)
def test_impossible_options_are_refused(changes: dict[str, float], message: str) -> None:
    """The error names the field, its value and what is allowed."""
    with pytest.raises(ValueError, match=message):
        options(**changes)


def test_outage_of_an_unknown_worker_is_refused() -> None:
    """A typing error must not simulate a sunny day."""
    with pytest.raises(ValueError, match=r"outage of 'prefill-9'; allowed: one of prefill-000"):
        run([row(0.0, 600)], options(outages=(Outage("prefill-9", 1.0),)))


def test_request_of_one_token_needs_no_late_decode_worker() -> None:
    """With `on_prefill_done` the decode worker is chosen when the prompt is done; by then the only token is out."""
    config = replace(options().scheduler, admission="on_prefill_done")
    found = outcomes(
        [row(0.0, 600, output=1), row(1.0, 600, output=3)], options(profile(first_token="prefill"), scheduler=config)
    )
    assert [outcome.status for outcome in found] == [OutcomeStatus.COMPLETED] * 2
