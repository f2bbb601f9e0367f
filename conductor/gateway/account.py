"""What one tenant uses at this gateway, held against its quotas.

Limits may change while requests run (a reload of the keys file); use so far stays. Quotas are checked before the body of a
request is read, so that refusing is cheap.
"""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic

from conductor.gateway.errors import ApiError, retry_after
from conductor.gateway.keys import Tenant
from conductor.gateway.token_bucket import TokenBucket

BUSY_RETRY_AFTER_S = 1.0


class Account:
    """Mutable. `in_flight` counts requests inside the gateway, `active` those of them that have their turn at the cluster."""

    def __init__(self, tenant: Tenant, clock: Callable[[], float] = monotonic) -> None:
        self.tenant = tenant
        self.in_flight = 0
        self.active = 0
        self._clock = clock
        self._bucket = self._new_bucket(None)

    @property
    def waiting(self) -> int:
        return self.in_flight - self.active

    @property
    def level_tokens(self) -> float | None:
        """What is left of the token quota; None without one."""
        return None if self._bucket is None else self._bucket.level_tokens(self._clock())

    def change_limits(self, tenant: Tenant) -> None:
        self.tenant = tenant
        self._bucket = self._new_bucket(self._bucket)

    def _new_bucket(self, former: TokenBucket | None) -> TokenBucket | None:
        rate, burst = self.tenant.tokens_per_s, self.tenant.burst_tokens
        if rate is None or burst is None:
            return None
        return TokenBucket(rate, burst, self._clock()) if former is None else former.resized(rate, burst, self._clock())

    def check(self) -> None:
        """Raises `ApiError` 429 when a quota is used up."""
        limit = self.tenant.max_in_flight
        if limit is not None and self.in_flight >= limit:
            message = f"tenant {self.tenant.name!r} has {self.in_flight} requests in flight; allowed: {limit}"
            raise _exhausted(message, "quota_concurrency", BUSY_RETRY_AFTER_S)
        wait_s = None if self._bucket is None else self._bucket.wait_s(self._clock())
        if wait_s is not None:
            message = f"tenant {self.tenant.name!r} has used up its tokens; allowed: {self.tenant.tokens_per_s:g} a second"
            raise _exhausted(message, "quota_tokens", wait_s)

    def charge(self, tokens: int) -> None:
        if self._bucket is not None:
            self._bucket.charge(tokens, self._clock())


def _exhausted(message: str, code: str, wait_s: float) -> ApiError:
    details = {"reason": code, "retry_after_s": wait_s}
    return ApiError(429, message, code, headers=retry_after(wait_s), details=details)
