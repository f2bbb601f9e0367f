"""What has to be computed when a prompt's prefix is cached, for models that keep window state apart from global state.

Global state goes into shared tiers; window state is cheap to rebuild and stays on the host that made it. So a prefix may be
found with or without it (DeepSeek-V4.1 report, section 3.2.1):

    global state   window state   computed
    missing        -              the whole prompt
    found          found          the suffix
    found          missing        the last W tokens of the prefix again (replay), then the suffix

Replayed tokens read the cached global state and see window state of replayed tokens alone: token i sees
[max(s, i-W+1), i], s being the first one replayed. With L window layers the result is exact if L*W tokens are replayed,
and an approximation if only W are. Torch-free.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Recompute:
    """Tokens of a prompt to run: first `replayed`, whose global state is not written, then `computed`."""

    replayed: range
    computed: range

    @property
    def tokens(self) -> int:
        return len(self.replayed) + len(self.computed)


def plan_recompute(
    prompt_tokens: int, *, global_hit_tokens: int, window_hit: bool, window_tokens: int, replay_tokens: int | None = None
) -> Recompute:
    """`global_hit_tokens` of the prompt's prefix are cached; at least the last token is computed. `replay_tokens`: how many to
    replay instead of one window."""
    if not 0 <= global_hit_tokens <= prompt_tokens or prompt_tokens < 1:
        raise ValueError(f"global_hit_tokens is {global_hit_tokens}; allowed: 0 to the prompt's {prompt_tokens} tokens")
    start = min(global_hit_tokens, prompt_tokens - 1)
    again = 0 if window_hit else min(start, window_tokens if replay_tokens is None else replay_tokens)
    return Recompute(range(start - again, start), range(start, prompt_tokens))
