"""KV through Ray Direct Transport with NIXL: Ray owns the object, NIXL moves its bytes between the two processes.

An offer is one tensor, copied from the cache, because a reader that is still under way when the offer ends would otherwise read
blocks that are used again; Ray keeps the copy for as long as a ticket holds its reference. Where NIXL by itself is at hand it
reads the cache in place and is faster; this one needs nothing but what Ray brings along, and an actor that was created with
`enable_tensor_transport`.
"""

from __future__ import annotations

import importlib.util
import time
import uuid
from collections.abc import Callable
from typing import Any

import numpy as np
import ray
import torch
from ray.exceptions import GetTimeoutError, RayError
from ray.experimental.rdt.util import get_tensor_transport_manager

from workers.kv_transfer.base import (
    KVDescriptor,
    KVTicket,
    OfferGone,
    TransferError,
    TransferTimeout,
    TransportUnavailable,
)
from workers.kv_transfer.blocks import KVBlocks
from workers.kv_transfer.leased import LeasedTransport, wrong_length
from workers.kv_transfer.nixl import start_agent
from workers.kv_transfer.rdma import rdma_devices, why_no_rdma

NIXL = "nixl"


class DirectTransport(LeasedTransport):
    """Needs a process that is connected to Ray. Raises `TransportUnavailable` where Ray would not find NIXL."""

    name = "rdt_nixl"
    checksums = False

    def __init__(self, kv: KVDescriptor, clock: Callable[[], float] = time.time) -> None:
        if importlib.util.find_spec(NIXL) is None:
            raise TransportUnavailable("transport 'rdt_nixl' needs the package nixl, which Ray imports: pip install nixl")
        super().__init__(kv, clock)
        _let_idle_agent_sleep()
        self._references: dict[str, ray.ObjectRef[Any]] = {}

    @property
    def protocol(self) -> str:
        absent = why_no_rdma()
        how = f"RDMA ({', '.join(rdma_devices())})" if absent is None else f"shared memory or TCP (no RDMA: {absent})"
        return f"Ray Direct Transport, NIXL over {how}"

    def _publish(self, offer_id: str, blocks: KVBlocks) -> ray.ObjectRef[Any]:
        packed = torch.from_numpy(np.stack(blocks.copy()))
        try:
            reference = ray.put(packed, _tensor_transport=NIXL)
        except (RayError, RuntimeError, ValueError) as error:
            raise TransferError(f"Ray Direct Transport did not take the KV: {error}") from error
        self._references[offer_id] = reference
        return reference

    def _receive(self, ticket: KVTicket, into: KVBlocks, first: int, timeout_s: float) -> None:
        try:
            packed: torch.Tensor = ray.get(ticket.location, timeout=timeout_s)
        except GetTimeoutError as error:
            raise TransferTimeout(f"offer {ticket.id} did not arrive within {timeout_s:g} s") from error
        except RayError as error:
            raise OfferGone(f"offer {ticket.id} is lost with its source: {type(error).__name__}") from error
        if packed.shape[:2] != (ticket.layers, ticket.blocks):
            raise wrong_length(ticket, f"{packed.shape[1]} blocks of {packed.shape[0]} layers")
        for layer, array in enumerate(packed.numpy()):
            into.fill(layer, array[first : first + len(into.ids)])

    def _withdraw(self, offer_id: str) -> None:
        self._references.pop(offer_id, None)


def _let_idle_agent_sleep() -> None:
    """Have Ray start this process' NIXL agent as `nixl` does here: as Ray starts it, an idle agent takes up to a whole core.

    Agents over anything but UCX are left as they are.
    """
    manager: Any = get_tensor_transport_manager("NIXL")
    starts = type(manager)._make_nixl_agent
    manager._make_nixl_agent = lambda backend: start_agent(uuid.uuid4().hex) if backend == "UCX" else starts(manager, backend)
