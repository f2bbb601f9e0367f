"""Algorithm 1 of the Mooncake paper (FAST'25, section 6), to the letter.

For every prefill worker: if the longest prefix held anywhere exceeds what the worker holds itself by more than
`kvcache_balancing_threshold` times, it would fetch the difference; otherwise it uses its own. The lowest
transfer + queue + prefill time wins.

What the paper leaves open is settled so:
- the ratio `best_len / prefix_len` is written as a product, so a cold worker (prefix_len 0) fetches whenever anyone holds
  anything;
- the threshold is at least 1, so the best holder never fetches from itself;
- equality keeps the local branch (FAST'25 tests `>`, the arXiv versions `<`);
- the transfer is added serially, although layer-wise overlap would hide part of it;
- nothing compares fetching with recomputing: the ratio alone decides;
- equal times go to the first worker in order of id (the paper's `>` keeps the first instance seen).
"""

from __future__ import annotations

import numpy as np

from conductor.core.placement import Choice, Situation, candidates, finish, lowest
from conductor.core.ttft import Reuse


def place_kvcache_centric(situation: Situation) -> Choice | None:
    terms, config = situation.terms, situation.config
    local = terms.local_tokens
    fetches = (terms.best_tokens > config.kvcache_balancing_threshold * local) & config.allow_pull
    prefix = np.where(fetches, terms.best_tokens, local)
    transfer_tokens = prefix - local
    transfer_s = terms.pull_s(transfer_tokens)
    prefill_s = terms.prefill_s(prefix)
    ttft_s = transfer_s + terms.queue_s + prefill_s
    sources = () if terms.best is None else (terms.best,)
    table = candidates(terms, Reuse(transfer_s, prefill_s, transfer_tokens, sources), ttft_s)
    return finish(situation, table, lowest(ttft_s, situation.prefill_eligible))
