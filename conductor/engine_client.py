"""What the gateway needs of the cluster behind it: one small protocol, so that the gateway runs over Ray, over a null engine
(benchmarks) and over a scripted one (tests) alike."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

from conductor.core.messages import GenerationJob, TokenOutput
from conductor.core.types import BlockHash, Decision, RequestId

HashPrompt: TypeAlias = Callable[[bytes, str], tuple[BlockHash, ...]]
"""Little-endian int32 tokens and a cache domain (`Request.cache_domain`) to the hashes of the full blocks."""


@dataclass(frozen=True, slots=True)
class ClusterStatus:
    """A picture of the cluster for `/ready`, `/metrics` and people. `workers` maps worker id to plain JSON values."""

    ready: bool
    reason: str
    model: str
    workers: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    counters: Mapping[str, float] = field(default_factory=dict)


class EngineClient(Protocol):
    """Sends requests to the cluster and brings back their tokens."""

    @property
    def channel(self) -> str:
        """Name under which workers address output to this client."""

    async def submit(self, job: GenerationJob) -> Decision:
        """Ask for a decision. A `Placement` means that tokens will come; a `Rejection` is final."""

    def outputs(self, request_id: RequestId) -> AsyncIterator[TokenOutput]:
        """The tokens of a placed request in order of `index`, each once, whatever happens to workers meanwhile; ends after the
        output that carries `finish_reason`."""

    async def cancel(self, request_id: RequestId) -> None:
        """Stop a request on every worker. Unknown and finished requests are ignored."""

    async def decision(self, request_id: RequestId) -> Mapping[str, Any] | None:
        """Everything known of one decision as JSON values: candidates with their terms, the choice, what happened."""

    async def overview(self) -> Mapping[str, Any]:
        """The last decisions and what the last requests add up to, as JSON values; `core/overview.py` has the keys."""

    async def status(self) -> ClusterStatus: ...

    async def cache_command(self, action: str, name: BlockHash | None) -> Mapping[str, Any]:
        """What every worker answers to an operator's question about its tiers; see `gateway/admin_cache.py`."""
