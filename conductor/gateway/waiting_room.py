"""Turns at the cluster: at most `places` requests have one, the others wait, and who is next is decided between tenants by
deficit round robin over the tokens that their requests ask for.

A request waits after it was tokenized, so that its cost is known, and before the scheduler hears of it, so that a tenant's
flood of requests delays that tenant alone.
"""

from __future__ import annotations

import asyncio
from types import TracebackType

from conductor.gateway.account import Account
from conductor.gateway.errors import ApiError, retry_after
from conductor.gateway.fair_queue import FairQueue

QUANTUM_TOKENS = 1024.0


class WaitingRoom:
    """Mutable: how many turns are taken, and who waits for one."""

    def __init__(self, places: int, max_wait_s: float) -> None:
        self._places = places
        self._max_wait_s = max_wait_s
        self._active = 0
        self._queue: FairQueue[asyncio.Future[None]] = FairQueue(QUANTUM_TOKENS)

    def __len__(self) -> int:
        return len(self._queue)

    def turn(self, account: Account, cost_tokens: int) -> Turn:
        """An asynchronous context in which the caller has its turn; entering it may wait."""
        return Turn(self, account, cost_tokens)

    async def take(self, account: Account, cost_tokens: int) -> None:
        """Raises `ApiError` 503 when the turn did not come in time."""
        if self._active < self._places and not self._queue:
            self._active += 1
        else:
            await self._wait(account, cost_tokens)
        account.active += 1

    def give_back(self, account: Account) -> None:
        account.active -= 1
        self._pass_on()

    async def _wait(self, account: Account, cost_tokens: int) -> None:
        tenant = account.tenant
        ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue.push(tenant.name, ready, cost=cost_tokens, weight=tenant.weight)
        try:
            async with asyncio.timeout(self._max_wait_s):
                await ready
        except BaseException as problem:
            waited = self._queue.remove(tenant.name, ready)
            if not waited and not ready.cancelled():
                self._pass_on()  # the turn came in the same moment
            if isinstance(problem, TimeoutError):
                raise self._waited_too_long() from None
            raise

    def _pass_on(self) -> None:
        """A turn has ended: it goes to the next, or is free."""
        while self._queue:
            ready = self._queue.pop()
            if not ready.cancelled():  # else its task has yet to learn that it waits no longer
                ready.set_result(None)
                return
        self._active -= 1

    def _waited_too_long(self) -> ApiError:
        message = f"no turn at the cluster within {self._max_wait_s:g} s; {self._places} requests run and {len(self)} wait"
        return ApiError(503, message, "gateway_wait_timeout", headers=retry_after(1.0), details={"retry_after_s": 1.0})


class Turn:
    def __init__(self, room: WaitingRoom, account: Account, cost_tokens: int) -> None:
        self._room = room
        self._account = account
        self._cost_tokens = cost_tokens

    async def __aenter__(self) -> None:
        await self._room.take(self._account, self._cost_tokens)

    async def __aexit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._room.give_back(self._account)
