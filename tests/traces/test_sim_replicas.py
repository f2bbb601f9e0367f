"""How many workers hold a block, over time."""

from traces.sim.cache import BlockCache
from traces.sim.replicas import LOOK_EVERY_S, ReplicaLog


def pool(*blocks: int) -> BlockCache:
    made = BlockCache(10)
    made.store(blocks)
    return made


def test_blocks_rank_by_their_holders_summed_over_all_looks() -> None:
    """Block 1 is everywhere, block 2 on one worker; the second look comes when it is due, not before."""
    log = ReplicaLog()
    log.look(0.0, [])
    log.look(LOOK_EVERY_S, [pool(1, 2), pool(1)])
    log.look(LOOK_EVERY_S + 1, [pool(9)])
    log.look(2 * LOOK_EVERY_S, [pool(1), pool(3)])
    assert log.holders((1, 2, 100)) == {1: (2, 1), 2: (1, 0)}


def test_log_without_a_look_knows_nothing() -> None:
    assert ReplicaLog().holders((1,)) == {}
