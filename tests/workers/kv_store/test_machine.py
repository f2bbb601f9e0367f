"""Any order of what workers and operators do to a tier, against a model that knows what was ever stored and what is pinned."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test

from conductor.core.types import BlockHash
from tests.workers.kv_store.conftest import MAKERS
from tests.workers.kv_store.doubles import chain, new_blocks
from tests.workers.kv_store.test_tiers import read
from workers.block_pool import Stored
from workers.kv_store.base import KVTier, TierChange

CAPACITY = 14
BRANCHES, DEPTHS = st.integers(0, 4), st.integers(1, 6)
WORKERS = st.integers(0, 1)


class TierMachine(RuleBasedStateMachine):
    """Two workers on one tier; on disk one, for there each has an index and a space of its own."""

    kind = "host"

    @initialize()
    def open(self) -> None:
        self.path = Path(tempfile.mkdtemp())
        self.tiers: list[KVTier] = [self.make() for _ in range(1 if self.kind == "disk" else 2)]
        self.ever: set[BlockHash] = set()
        self.claims: set[BlockHash] = set()
        self.pinned: set[BlockHash] = set()
        self.told = [set(tier.snapshot()) for tier in self.tiers]  # by each worker

    def make(self) -> KVTier:
        return MAKERS[self.kind](self.path, CAPACITY)

    def tier(self, worker: int) -> KVTier:
        return self.tiers[worker % len(self.tiers)]

    @rule(worker=WORKERS, branch=BRANCHES, depth=DEPTHS)
    def store(self, worker: int, branch: int, depth: int) -> None:
        names = chain(branch, depth)
        self.tier(worker).put(new_blocks(names))
        self.ever.update(names)
        self.listen()

    @rule(worker=WORKERS, branch=BRANCHES, depth=DEPTHS)
    def restore(self, worker: int, branch: int, depth: int) -> None:
        tier, names = self.tier(worker), chain(branch, depth)
        held = tier.match(names)
        assert read(tier, names) == held
        self.listen()

    @rule(worker=WORKERS, branch=BRANCHES, depth=DEPTHS)
    def drop(self, worker: int, branch: int, depth: int) -> None:
        self.tier(worker).remove(chain(branch, depth)[-1:])
        self.listen()

    @rule(worker=WORKERS, branch=BRANCHES, depth=st.integers(1, 3))
    def pin(self, worker: int, branch: int, depth: int) -> None:
        names = chain(branch, depth)
        self.pinned.update(names[: self.tier(worker).pin(names)])

    @rule(worker=WORKERS)
    def unpin_all(self, worker: int) -> None:
        self.tier(worker).unpin(sorted(self.pinned))
        self.pinned.clear()

    @precondition(lambda self: len(self.tiers) > 1)
    @rule(worker=WORKERS)
    def restart(self, worker: int) -> None:
        """One worker leaves and comes back; what the other one has open stays."""
        self.tiers.pop(worker).close()
        del self.told[worker]
        self.tiers.append(self.make())
        self.told.append(set(self.tiers[-1].snapshot()))

    @rule(worker=WORKERS)
    def look(self, worker: int) -> None:
        """Then a worker has told of everything that is held and of nothing else, whoever has stored or removed it."""
        told, tier = self.told[worker % len(self.tiers)], self.tier(worker)
        hear(told, tier.look())
        assert {block.name for block in tier.held()} == told
        assert tier.look() == []

    def listen(self) -> None:
        """What the Conductor would believe."""
        for tier, told in zip(self.tiers, self.told, strict=True):
            changes = tier.drain_changes()
            hear(self.claims, changes)
            hear(told, changes)

    @invariant()
    def holds(self) -> None:
        for tier in self.tiers:
            held = {block.name: block for block in tier.held()}
            assert held.keys() == self.claims
            assert held.keys() <= self.ever
            assert len(held) <= CAPACITY
            assert self.pinned <= held.keys()
            assert all(block.parent is None or block.parent in held for block in held.values())

    def teardown(self) -> None:
        for tier in getattr(self, "tiers", ()):
            tier.close()
        if hasattr(self, "path"):
            shutil.rmtree(self.path)


def hear(claims: set[BlockHash], changes: list[TierChange]) -> None:
    for change in changes:
        (claims.update if isinstance(change, Stored) else claims.difference_update)(change.blocks)


@pytest.mark.parametrize("kind", sorted(MAKERS))
def test_any_order_of_operations(kind: str) -> None:
    """Claims are what is held, what is held was stored, is closed, fits, and has everything that is pinned."""
    machine = type("Machine", (TierMachine,), {"kind": kind})
    run_state_machine_as_test(machine, settings=settings(max_examples=25, stateful_step_count=25, deadline=None))
