"""The worker actors as other processes see them: the names of their methods, and nothing else.

Whoever is handed an actor's handle loads the actor's class. The Conductor and the gateway only call workers, so what they load
must not bring torch and the models with it: two seconds of a Conductor's restart, and 200 MB. The worker behind these methods
is imported and made in the process of the actor. The methods and their meaning: "Actor protocol" in `conductor/DESIGN.md`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from importlib import import_module
from typing import Any

from workers.config import WorkerConfig

STREAMS = ("outputs",)
CALLS = (
    "alive",
    "attach",
    "cache_command",
    "cancel",
    "close",
    "describe",
    "drop_blocks",
    "offer_blocks",
    "offer_probes",
    "pull_blocks",
    "rank_transports",
    "release_offer",
    "shun_transport",
    "snapshot",
    "stats",
    "use_transports",
)
PREFILL_CALLS = ("prefill", "choose_decode")
DECODE_CALLS = ("receive_parts", "accept_handover")


def _call(name: str) -> Callable[..., Any]:
    async def call(self: Any, *arguments: Any, **named: Any) -> Any:
        return await getattr(self.worker, name)(*arguments, **named)

    return call


def _stream(name: str) -> Callable[..., Any]:
    async def stream(self: Any, *arguments: Any, **named: Any) -> AsyncIterator[Any]:
        async for item in getattr(self.worker, name)(*arguments, **named):
            yield item

    return stream


def _remote(module: str, name: str, calls: tuple[str, ...]) -> type:
    """A class with these calls, each answered by the class `name` of `module`."""

    def make(self: Any, config: WorkerConfig) -> None:
        self.worker = getattr(import_module(module), name)(config)

    methods = {call: _call(call) for call in calls} | {stream: _stream(stream) for stream in STREAMS}
    return type(
        name, (), {"__init__": make, "__module__": __name__, "__doc__": f"`{module}.{name}`, called from afar."} | methods
    )


PrefillWorker = _remote("workers.prefill", "PrefillWorker", CALLS + PREFILL_CALLS)
DecodeWorker = _remote("workers.decode", "DecodeWorker", CALLS + DECODE_CALLS)
