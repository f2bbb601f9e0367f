"""Starting or joining Ray, finding the Conductor on it, and reading its errors.

What is set before `ray.init` decides for every process that Ray starts: authentication and thread counts. So it
is set in one place, here. Which actors there are is `cluster.py`'s business.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from conductor.config import ClusterSection

logger = logging.getLogger(__name__)

CONDUCTOR_NAME = "conductor"
MIB = 2**20
FREE_OBJECTS_MS = 10  # Ray's own second lets KV that was handed over pile up, and what comes next goes to pages never touched
CONNECT_TIMEOUT_S = 3.0


class ClusterError(RuntimeError):
    """The cluster cannot be started; the message is one line for people."""


class NoAnswer(ClusterError):
    """Nobody listens at the address of the cluster."""


def actor_environment(threads: int) -> dict[str, str]:
    """What every actor process finds in its environment."""
    return {"OMP_NUM_THREADS": str(threads)}


def check_address(address: str) -> str:
    """Whether somebody listens where Ray is said to be, for Ray itself would try for minutes; `auto` is found by Ray. Raises
    `NoAnswer`."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not port.isdigit():
        return f"is looked for at {address}"
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_TIMEOUT_S).close()
    except (OSError, OverflowError) as error:
        raise NoAnswer(f"cluster.address {address} does not answer: {error}; allowed: where a Ray cluster runs") from None
    return f"answers at {address}"


def connect(section: ClusterSection, num_cpus: int, environment: Mapping[str, str]) -> None:
    """Start a local Ray, whose processes inherit `environment`, or join the one at `section.address`. Raises `ClusterError`."""
    os.environ.update(environment)
    if section.address is None:
        os.environ["RAY_AUTH_MODE"] = section.auth_mode
    else:
        check_address(section.address)
        os.environ.setdefault("RAY_AUTH_MODE", section.auth_mode)  # a job has its cluster's mode from its environment
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # actors without a GPU see the devices that there are
    os.environ.setdefault("RAY_free_objects_period_milliseconds", str(FREE_OBJECTS_MS))
    import ray

    options: dict[str, Any] = {"namespace": section.namespace, "log_to_driver": False, "logging_level": logging.WARNING}
    if section.address is None:
        options |= {"address": "local", "num_cpus": num_cpus, "include_dashboard": section.dashboard}
        options |= {"object_store_memory": section.object_store_mib * MIB}
    else:
        options |= {"address": section.address}
    try:
        ray.init(**options)
    except Exception as error:
        raise ClusterError(f"Ray did not start: {first_cause(error)}") from None


def find_conductor(section: ClusterSection) -> Any:
    """The Conductor's handle on a cluster that is joined already. Raises `ClusterError`."""
    import ray

    try:
        return ray.get_actor(CONDUCTOR_NAME, namespace=section.namespace)
    except ValueError:
        raise ClusterError(
            f"no actor {CONDUCTOR_NAME!r} in the Ray namespace {section.namespace!r}; start `conductor serve`"
        ) from None


def first_cause(error: BaseException) -> str:
    """One line for people: the message of the exception that began it, without Ray's wrapping."""
    cause = getattr(error, "cause", None)
    if isinstance(cause, BaseException):
        return first_cause(cause)
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__


def is_worker_loss(error: BaseException) -> bool:
    """Whether a call failed because its target is gone, rather than because the target could not do it (its own peer being
    gone included)."""
    from ray.exceptions import RayActorError, RayTaskError

    return isinstance(error, RayActorError) and not isinstance(error, RayTaskError)


def will_answer_again(error: BaseException) -> bool:
    """Whether a call failed because its target is just being started again."""
    from ray.exceptions import ActorUnavailableError

    return isinstance(error, ActorUnavailableError)


async def until_gone(handle: Any) -> None:
    """Wait until an actor's `alive()` ends, however it ends."""
    try:
        await handle.alive.remote()
    except Exception as error:
        logger.info("an actor is gone: %s", type(error).__name__)
