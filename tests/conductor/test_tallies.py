"""Plain counters export exactly what the client library's own metrics export."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from conductor.tallies import Distribution, Tally

BOUNDS = (0.1, 1.0, 10.0)


def exported(registry: CollectorRegistry) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Samples by name and labels, but for the time at which a metric was made."""
    families = text_string_to_metric_families(generate_latest(registry).decode())
    samples = [sample for family in families for sample in family.samples if not sample.name.endswith("_created")]
    return {(sample.name, tuple(sorted(sample.labels.items()))): sample.value for sample in samples}


@given(values=st.lists(st.one_of(st.sampled_from(BOUNDS), st.floats(0, 100)), max_size=50))
@settings(max_examples=60, deadline=None)
def test_a_distribution_is_the_library_s_histogram(values: list[float]) -> None:
    """Values on a bound included."""
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    distribution = Distribution("x_seconds", "words", ours, BOUNDS)
    histogram = Histogram("x_seconds", "words", buckets=BOUNDS, registry=theirs)
    for value in values:
        distribution.observe(value)
        histogram.observe(value)
    assert exported(ours) == exported(theirs)


@given(adds=st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from("xy"), st.integers(0, 1000)), max_size=30))
@settings(max_examples=60, deadline=None)
def test_a_tally_is_the_library_s_counter(adds: list[tuple[str, str, int]]) -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    tally = Tally("x", "words", ours, ["one", "two"])
    counter = Counter("x", "words", ["one", "two"], registry=theirs)
    for one, two, amount in adds:
        tally.add(amount, one, two)
        counter.labels(one, two).inc(amount)
    assert exported(ours) == exported(theirs)


def test_a_tally_without_labels_is_there_from_the_start() -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    Tally("x", "words", ours)
    Counter("x", "words", registry=theirs)
    assert exported(ours) == exported(theirs)
