"""When the cluster may be asked for work, which is what `/ready` says.

It takes a worker of each role. A Conductor that has just been started knows no caches yet: what it placed now would be computed
anew wherever its prefix lies. So it is not ready before the first snapshot of every worker that has joined is in its index, or
the worker has owed it for so long that waiting serves nobody. Once somebody has been told that the cluster is ready, a worker
that joins takes nothing from that: whoever was there before still serves, and a balancer must not take the gateway out for it.
"""

from __future__ import annotations

from collections.abc import Collection

from conductor.core.types import Role, WorkerId
from conductor.worker_calls import Worker

FIRST_SNAPSHOT_WAIT_S = 15.0


class Readiness:
    def __init__(self) -> None:
        self._told = False

    def hindrance(self, workers: Collection[Worker], unknown: Collection[WorkerId], now: float) -> str | None:
        """Why the cluster is not ready. `unknown`: whose caches have not been taken in since they joined."""
        staying = [worker for worker in workers if not worker.draining]
        roles = {worker.spec.role for worker in staying}
        missing = [role.value for role in (Role.PREFILL, Role.DECODE) if not roles & {role, Role.COUPLED}]
        if missing:
            return f"no {' and no '.join(missing)} worker"
        owing = [
            worker.spec.id
            for worker in staying
            if worker.spec.id in unknown and now - worker.joined_s < FIRST_SNAPSHOT_WAIT_S and not self._told
        ]
        self._told = not owing
        return f"no snapshot yet of the cache of {', '.join(sorted(owing))}" if owing else None
