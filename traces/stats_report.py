"""Tables of a trace's statistics for people."""

from __future__ import annotations

from collections.abc import Iterator

from rich.table import Table

from traces.stats import Lengths, Reuse, TraceStats


def stats_tables(name: str, stats: TraceStats) -> Iterator[Table]:
    """Lengths and arrivals; where the trace has prefix identity also hit ratios by capacity and by reuse time."""
    yield _lengths(name, stats)
    yield _arrivals(stats)
    if stats.reuse is not None:
        yield _ideal(stats.reuse)
        yield _capacities(stats.reuse)
        yield _reuse_times(stats.reuse)


def _lengths(name: str, stats: TraceStats) -> Table:
    table = _table(f"{name}: {stats.requests:,} requests", "tokens", "mean", "p50", "p90", "p99", "max")
    for label, each in (("input", stats.input_tokens), ("output", stats.output_tokens)):
        table.add_row(label, *_length_cells(each))
    return table


def _length_cells(lengths: Lengths) -> list[str]:
    return [f"{lengths.mean:,.1f}", *(f"{value:,.0f}" for value in (lengths.p50, lengths.p90, lengths.p99, lengths.max))]


def _arrivals(stats: TraceStats) -> Table:
    found = stats.arrivals
    table = _table("Arrivals", "", "")
    table.add_row("duration, s", f"{found.duration_s:,.1f}")
    for label, value in (
        ("requests/s", found.requests_per_s),
        ("input tokens/s", found.input_tokens_per_s),
        ("interval, coefficient of variation", found.interval_cv),
        (f"dispersion of counts in {found.dispersion_window_s:g} s", found.dispersion),
    ):
        table.add_row(label, "-" if value is None else f"{value:,.2f}")
    table.add_row("distinct times", f"{found.distinct_times:,}")
    return table


def _ideal(reuse: Reuse) -> Table:
    table = _table("Infinite cache", "", "")
    table.add_row(f"blocks of {reuse.block_tokens} tokens", f"{reuse.blocks:,}")
    table.add_row("distinct blocks", f"{reuse.distinct_blocks:,}")
    table.add_row("hit ratio, blocks", f"{reuse.block_hit_ratio:.1%}")
    table.add_row("hit ratio, tokens", f"{reuse.token_hit_ratio:.1%}")
    table.add_row("prefill compute saved (equation 1)", f"{reuse.compute_saved:.1%}")
    return table


def _capacities(reuse: Reuse) -> Table:
    policies = list(dict.fromkeys(point.policy for point in reuse.capacities))
    table = _table("Block hit ratio by capacity", "blocks", "tokens", *policies, "lru (tokens)", "of max.")
    ratios = {(point.policy, point.capacity_blocks): point for point in reuse.capacities}
    for blocks in dict.fromkeys(point.capacity_blocks for point in reuse.capacities):
        lru = ratios["lru", blocks]
        tokens = lru.token_hit_ratio or 0.0
        share = f"{tokens / reuse.token_hit_ratio:.1%}" if reuse.token_hit_ratio else "-"
        row = [f"{ratios[policy, blocks].block_hit_ratio:.3f}" for policy in policies]
        table.add_row(f"{blocks:,}", f"{lru.capacity_tokens:,}", *row, f"{tokens:.3f}", share)
    return table


def _reuse_times(reuse: Reuse) -> Table:
    windows = list(reuse.reuse_times[0].share_by_window_s) if reuse.reuse_times else []
    table = _table(
        "Share of hits served by a block kept so long after its last use", "class", *(f"{each} s" for each in windows)
    )
    table.add_column(f"loses {reuse.reuse_times[0].loss_share:.1%}" if reuse.reuse_times else "", justify="right")
    for each in reuse.reuse_times:
        cells = [f"{share:.0%}" for share in each.share_by_window_s.values()]
        table.add_row(each.traffic_class, *cells, f"{each.retention_s:,.0f} s")
    return table


def _table(title: str, first: str, *others: str) -> Table:
    table = Table(title=title, title_justify="left", show_header=bool(first))
    table.add_column(first)
    for heading in others:
        table.add_column(heading, justify="right")
    return table
