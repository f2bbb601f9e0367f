"""What a policy gets to see of a request: match, estimate terms, decode need, and who may take it at all.

A request is looked at on arrival and again when its turn comes, mostly with nothing in between but time. What was found out
about its prefix and the work that it means is kept until a cache, a link or the speed of a worker changes.
"""

from __future__ import annotations

from collections.abc import Callable

from conductor.core import admission
from conductor.core.cluster_view import ClusterView
from conductor.core.config import SchedulerConfig
from conductor.core.output_length import OutputLengths
from conductor.core.placement import Situation, eligible
from conductor.core.prefix_index import PrefixIndex
from conductor.core.requests import RequestState
from conductor.core.tbt import DecodeChoice, DecodeNeed, choose_decode
from conductor.core.ttft import PrefillTerms, prefill_terms
from conductor.core.types import Rejection, RejectReason, Request
from conductor.core.worker_table import FloatArray


class Assessor:
    """Reads the belief and changes nothing. `decisions` counts those made so far; `line` tells how many requests wait in the
    central line, and for how many seconds of work."""

    def __init__(
        self,
        config: SchedulerConfig,
        index: PrefixIndex,
        view: ClusterView,
        outputs: OutputLengths,
        line: Callable[[], tuple[int, float]],
    ) -> None:
        self.decisions = 0
        self._outputs = outputs
        self._config = config
        self._index = index
        self._view = view
        self._line = line
        self._kept: tuple[Request, int, PrefillTerms] | None = None

    def assess(self, state: RequestState, now: float, booked_s: FloatArray | None = None) -> Situation | None:
        """What a policy sees of a request, with `booked_s` more work on the prefill workers; None without any worker."""
        view, request = self._view, state.request
        if not self.anybody:
            return None
        terms = self.terms(request, now)
        if booked_s is not None:
            terms.queue_s = terms.queue_s + booked_s
        return Situation(
            request=request,
            terms=terms,
            need=self.decode_need(request),
            view=view,
            config=self._config,
            now=now,
            sequence=self.decisions,
            waited_s=now - state.arrived_s,
            waiting=self._line()[0],
            prefill_eligible=eligible(view.prefill, request, state.avoid, view.prefill.accepts),
            decode_eligible=eligible(view.decode, request, state.avoid, view.decode.accepts),
            backlog_s=self.backlog_s,
        )

    @property
    def anybody(self) -> bool:
        """Whether there are workers for both phases."""
        return bool(self._view.prefill.ids and self._view.decode.ids)

    @property
    def backlog_s(self) -> float:
        """Seconds of work that wait in the central line for each prefill worker."""
        return self._line()[1] / len(self._view.prefill)

    def terms(self, request: Request, now: float) -> PrefillTerms:
        """The request's match, and what every prefill worker would have to do for it."""
        version = self._index.version + self._view.prefill.version
        kept = self._kept
        if kept is not None and kept[0] is request and kept[1] == version:
            terms = kept[2]
            terms.now, terms.queue_s = now, self._view.prefill.queue_s(now)
            return terms
        match = self._index.match(request.block_hashes)
        terms = prefill_terms(request, match, self._view, self._config.block_tokens, now)
        self._kept = request, self._index.version + self._view.prefill.version, terms
        return terms

    def decode_need(self, request: Request) -> DecodeNeed:
        output_tokens = self._outputs.expected_tokens(request)
        tokens = request.prompt_tokens + output_tokens
        return DecodeNeed(-(-tokens // self._config.block_tokens), request.prompt_tokens, output_tokens)

    def choose_decode(self, state: RequestState, need: DecodeNeed, now: float) -> DecodeChoice | None:
        """The decode worker for a prompt that has been computed before one was chosen."""
        pool = self._view.decode
        return choose_decode(pool, need, eligible(pool, state.request, state.avoid, pool.accepts), now)

    def nobody(self, request: Request) -> Rejection:
        """The refusal of a request that no worker may take."""
        if not self._view.prefill.accepts.any():
            return admission.refuse(request, RejectReason.NO_PREFILL, "no prefill worker takes requests", 1.0)
        return admission.refuse(request, RejectReason.NO_DECODE, "no decode worker takes requests", 1.0)
