"""Turns at the cluster: bounded, fair between tenants, and never lost."""

from __future__ import annotations

import asyncio

import pytest

from conductor.gateway.account import Account
from conductor.gateway.errors import ApiError
from conductor.gateway.keys import Tenant
from conductor.gateway.waiting_room import WaitingRoom


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def queue_up(room: WaitingRoom, account: Account, name: str, order: list[str]) -> asyncio.Task[None]:
    """A request that waits for its turn, notes when it has it, and gives it back."""

    async def request() -> None:
        async with room.turn(account, 1000):
            order.append(name)
            await asyncio.sleep(0)

    task = asyncio.ensure_future(request())
    await asyncio.sleep(0)
    return task


async def test_no_more_turns_than_places() -> None:
    room, account = WaitingRoom(2, max_wait_s=10), Account(Tenant("a"))
    async with room.turn(account, 1), room.turn(account, 1):
        third = await queue_up(room, account, "third", order := [])
        await settle()
        assert (order, len(room), account.active) == ([], 1, 2)
    await third
    assert (order, len(room), account.active) == (["third"], 0, 0)


async def test_a_tenant_with_one_request_passes_another_s_flood() -> None:
    """The flood came first; the single request still has the second turn."""
    room, flood, single = WaitingRoom(1, max_wait_s=10), Account(Tenant("flood")), Account(Tenant("single"))
    order: list[str] = []
    async with room.turn(flood, 1):
        tasks = [await queue_up(room, flood, f"flood{number}", order) for number in range(20)]
        tasks.append(await queue_up(room, single, "single", order))
    await asyncio.gather(*tasks)
    assert "single" in order[:2]
    assert len(order) == 21


async def test_who_goes_away_is_passed_over() -> None:
    """Also when it goes in the very moment in which its turn comes."""
    room, account = WaitingRoom(1, max_wait_s=10), Account(Tenant("a"))
    order: list[str] = []
    async with room.turn(account, 1):
        gone = await queue_up(room, account, "gone", order)
        late = await queue_up(room, account, "late", order)
        stays = await queue_up(room, account, "stays", order)
        gone.cancel()
        await settle()
    late.cancel()  # has been given the turn and has not run since
    await stays
    await asyncio.gather(gone, late, return_exceptions=True)
    assert order == ["stays"]
    async with room.turn(account, 1):
        assert account.active == 1


async def test_who_is_cancelled_but_has_not_run_yet_gets_no_turn() -> None:
    room, account = WaitingRoom(1, max_wait_s=10), Account(Tenant("a"))
    order: list[str] = []
    async with room.turn(account, 1):
        gone = await queue_up(room, account, "gone", order)
        stays = await queue_up(room, account, "stays", order)
        gone.cancel()
    await stays
    await asyncio.gather(gone, return_exceptions=True)
    assert (order, account.active) == (["stays"], 0)


async def test_a_turn_that_does_not_come_is_503() -> None:
    room, account = WaitingRoom(1, max_wait_s=0.01), Account(Tenant("a"))
    async with room.turn(account, 1):
        with pytest.raises(ApiError) as problem:
            await room.take(account, 1)
    assert (problem.value.status, problem.value.code) == (503, "gateway_wait_timeout")
    assert "retry-after" in problem.value.headers
    assert (len(room), account.active) == (0, 0)
