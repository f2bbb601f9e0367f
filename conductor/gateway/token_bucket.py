"""A rate of tokens over time, with a burst: what a tenant may still use.

Pure: the time is an argument. The length of an answer is known only when it has ended, so the bucket is charged afterwards and
may go into debt; a request is let in while the level is above zero. What is used over a long time is therefore the rate, and a
debt is never larger than what was in flight when the level reached zero.
"""

from __future__ import annotations


class TokenBucket:
    """Mutable; full at the start."""

    def __init__(self, tokens_per_s: float, burst_tokens: float, now_s: float) -> None:
        self._tokens_per_s = tokens_per_s
        self._burst_tokens = burst_tokens
        self._level_tokens = burst_tokens
        self._level_at_s = now_s

    def level_tokens(self, now_s: float) -> float:
        """What is left; negative in debt. A `now_s` before the last one counts as the last one."""
        elapsed_s = max(0.0, now_s - self._level_at_s)
        return min(self._burst_tokens, self._level_tokens + elapsed_s * self._tokens_per_s)

    def charge(self, tokens: float, now_s: float) -> None:
        self._level_tokens = self.level_tokens(now_s) - tokens
        self._level_at_s = max(now_s, self._level_at_s)

    def wait_s(self, now_s: float) -> float | None:
        """Seconds until the level is above zero, None if it is."""
        level_tokens = self.level_tokens(now_s)
        return None if level_tokens > 0 else -level_tokens / self._tokens_per_s

    def resized(self, tokens_per_s: float, burst_tokens: float, now_s: float) -> TokenBucket:
        """The same use so far under other limits: a debt stays, and a burst that shrinks cuts what is left."""
        bucket = TokenBucket(tokens_per_s, burst_tokens, now_s)
        bucket._level_tokens = min(burst_tokens, self.level_tokens(now_s))
        return bucket
