"""What a policy gets to see of a request: match, estimate terms, decode need, and who may take it at all.

A request is looked at on arrival and again when its turn comes, mostly with nothing in between but time. What was found out
about its prefix and the work that it means is kept until a cache, a link or the speed of a worker changes.
"""

from __future__ import annotations

from collections.abc import Callable

from conductor.core import admission
from conductor.core.cluster_view import ClusterView
from conductor.core.config import SchedulerConfig
from conductor.core.late_binding import LateBinding
from conductor.core.output_length import OutputLengths
from conductor.core.placement import Situation, eligible
from conductor.core.policies.conductor import least_work_s
from conductor.core.prefix_index import PrefixIndex
from conductor.core.requests import RequestState
from conductor.core.tbt import DecodeChoice, DecodeNeed, choose_decode
from conductor.core.ttft import PrefillTerms, prefill_terms
from conductor.core.types import Rejection, RejectReason, Request
from conductor.core.worker_table import FloatArray, WorkerTable, some


class Assessor:
    """Reads the belief and changes nothing. `decisions` counts those made so far; `line` is the central line."""

    def __init__(
        self,
        config: SchedulerConfig,
        index: PrefixIndex,
        view: ClusterView,
        outputs: OutputLengths,
        line: Callable[[], LateBinding],
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
            waiting=len(self._line()),
            prefill_eligible=eligible(view.prefill, request, state.avoid),
            decode_eligible=eligible(view.decode, request, state.avoid),
            backlog_s=self._backlog_s(state, terms, now),
        )

    @property
    def anybody(self) -> bool:
        """Whether there are workers for both phases."""
        return bool(self._view.prefill.ids and self._view.decode.ids)

    def _backlog_s(self, state: RequestState, terms: PrefillTerms, now: float) -> float:
        if admission.objectives(state.request, self._config).ttft_s is None:
            return 0.0
        work_s = least_work_s(terms, self._config.allow_pull)
        return self._line().work_before_s(state, work_s, now) / len(self._view.prefill)

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
        return choose_decode(pool, need, eligible(pool, state.request, state.avoid), now)

    def may_be_taken(self, state: RequestState) -> bool:
        """Whether there is a worker for each phase that takes new work, serves the model and has not failed the request."""
        request, view = state.request, self._view
        return some(eligible(view.prefill, request, state.avoid)) and some(eligible(view.decode, request, state.avoid))

    def nobody(self, state: RequestState) -> Rejection:
        """The refusal of a request that no worker may take."""
        request = state.request
        lacking = _lacking(self._view.prefill, state)
        if lacking is not None:
            return admission.refuse(request, RejectReason.NO_PREFILL, f"no prefill worker {lacking}", 1.0)
        lacking = _lacking(self._view.decode, state) or "was chosen by the policy"
        return admission.refuse(request, RejectReason.NO_DECODE, f"no decode worker {lacking}", 1.0)


def _lacking(pool: WorkerTable, state: RequestState) -> str | None:
    """What no worker of a pool is or does that the request asks for; None when there is one to take it."""
    model = state.request.model
    if not some(pool.accepts):
        return "takes requests"
    if model and not some(pool.accepts & pool.serving(model)):
        served = sorted({pool.specs[worker].model for worker in pool.ids if pool.accepts[pool.row[worker]]})
        return f"serves model {model!r}; served: {', '.join(served)}"
    if not some(eligible(pool, state.request, state.avoid)):
        return f"is left that has not failed the request: {', '.join(sorted(state.avoid))}"
    return None
