"""Ground truth of durations."""

import ast
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from traces.belief import chunks_of, fit_cost_profile
from traces.clusters.profile import ClusterError, load_profile, profile_names
from traces.service_time import DecodeTime

decode_times = st.builds(DecodeTime, st.floats(1e-3, 0.1), st.floats(0, 1e-3), st.floats(0, 1e-6), st.just(0.0))


@given(decode_times, st.integers(1, 64), st.integers(1, 200_000), st.integers(0, 300))
def test_skipped_decode_steps_take_as_long_as_single_ones(time: DecodeTime, batch: int, context: int, steps: int) -> None:
    """The closed form equals the sum over steps, each with one more token of KV a sequence."""
    run = time.run(batch, context)
    one_by_one = sum(time.step_s(batch, context + step * batch) for step in range(steps))
    assert one_by_one == pytest.approx(run.elapsed_s(steps))


@given(decode_times, st.integers(1, 64), st.integers(1, 200_000), st.floats(0, 60))
def test_boundary_is_the_first_one_at_or_after_a_moment(time: DecodeTime, batch: int, context: int, moment_s: float) -> None:
    """No step boundary between the moment and the one found."""
    run = time.run(batch, context)
    steps = run.steps_until(moment_s)
    assert run.elapsed_s(steps) >= moment_s
    assert steps == 0 or run.elapsed_s(steps - 1) < moment_s


def test_mock_engine_takes_the_published_time() -> None:
    """Prefill of 8,192 tokens takes 169.137 ms, a decode step on an empty worker 5.74 ms (Dynamo's polynomials)."""
    truth = load_profile("dynamo-mocker").service_time()
    assert pytest.approx(truth.prefill.step_s([(0, 8192)]), rel=1e-6) == 0.169136918
    assert truth.decode.step_s(1, 0) == 0.00574


@pytest.mark.parametrize(("prompt", "expected_s"), [(8192, 1.0), (16384, 2.0), (32768, 4.5), (65536, 10.5), (131072, 27.5)])
def test_a800_prefill_follows_figure_14(prompt: int, expected_s: float) -> None:
    """Within 8 % of the times read off the Mooncake paper's figure 14."""
    cluster = load_profile("llama3-70b-8xa800")
    truth = cluster.service_time().prefill
    took_s = sum(truth.step_s([chunk]) for chunk in chunks_of(prompt, 0, cluster.step_tokens))
    assert expected_s == pytest.approx(took_s, rel=0.08)


@pytest.mark.parametrize("name", profile_names())
def test_belief_is_close_to_the_truth_and_not_equal(name: str) -> None:
    """The fitted profile is within 15 % on long and short prompts, says that it is calibrated, and is not exact."""
    cluster = load_profile(name)
    truth, belief = cluster.service_time().prefill, fit_cost_profile(cluster)
    errors = []
    for prompt, reused in ((3000, 0), (12000, 512), (60000, 30720)):
        actual_s = sum(truth.step_s([chunk]) for chunk in chunks_of(prompt, reused, cluster.step_tokens))
        errors.append(abs(belief.prefill_s(prompt, reused) / actual_s - 1))
    assert belief.calibrated
    assert 0.0001 < max(errors) < 0.15


def test_truth_shares_no_code_with_the_belief() -> None:
    """Estimator error must not be zero by construction."""
    root = Path(__file__).parents[2] / "traces"
    for path in (root / "service_time.py", root / "clusters" / "profile.py"):
        imported = {node.module for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)}
        assert not [name for name in imported if name and name.startswith("conductor")]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- 1", "is .1.; allowed: a mapping of fields"),
        ("max_batch: [", "is not YAML"),
        ("max_batch: 0", "max_batch is 0; allowed: greater than 0"),
        ("speed: 3", "speed is 3; allowed: Extra inputs are not permitted"),
    ],
)
def test_faulty_profile_is_refused_by_field(tmp_path: Path, text: str, message: str) -> None:
    """The error names file, field, value and what is allowed."""
    path = tmp_path / "cluster.yaml"
    path.write_text(text)
    with pytest.raises(ClusterError, match=message):
        load_profile(str(path))


def test_unknown_profile_names_the_known_ones() -> None:
    """A name that is neither a profile nor a file."""
    with pytest.raises(ClusterError, match="dynamo-mocker, llama3-70b-8xa800"):
        load_profile("h100")
