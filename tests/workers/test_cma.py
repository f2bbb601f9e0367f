"""Cross-memory attach beyond the conformance suite: other hosts, processes that are gone, and more than one call takes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.workers.test_kv_transfer import KV, LEASE_S, ManualClock, cma_pair, kv, kv_arrays, same, take
from workers.kv_transfer.base import OfferGone, TransportUnavailable
from workers.kv_transfer.blocks import KVBlocks


def test_cross_memory_attach_reads_from_no_other_host() -> None:
    """There, the process id is somebody else's."""
    source, target = cma_pair(ManualClock())
    ticket = source.offer(kv(), LEASE_S)
    elsewhere = ticket.location.peer._replace(processes="another boot/1")
    with pytest.raises(TransportUnavailable, match="no process of another host"):
        take(target, replace(ticket, location=replace(ticket.location, peer=elsewhere)))


def test_cross_memory_attach_is_not_fooled_by_a_process_id_that_is_used_again() -> None:
    """What is not there any more, and what lies there instead, are both no offer."""
    source, target = cma_pair(ManualClock())
    ticket = source.offer(kv(), LEASE_S)
    gone = ticket.location.peer._replace(pid=2**22 - 1)
    with pytest.raises(OfferGone, match="No such process"):
        take(target, replace(ticket, location=replace(ticket.location, peer=gone)))
    unmapped = replace(ticket.location, bases=(1 << 20,) * KV.num_layers)
    with pytest.raises(OfferGone, match="Bad address"):
        take(target, replace(ticket, location=unmapped))
    with pytest.raises(OfferGone, match="released"):
        take(target, replace(ticket, location=replace(ticket.location, word=5)))


def test_many_scattered_blocks_are_read_in_several_calls() -> None:
    """More runs than one call of the kernel takes."""
    blocks = 3001
    source, target = cma_pair(ManualClock())
    arrays = kv_arrays(blocks)
    ids = tuple(range(0, blocks, 2))
    ticket = source.offer(KVBlocks(tuple(arrays), ids), LEASE_S)
    assert same(take(target, ticket), [rows[::2] for rows in arrays])
