"""What a policy gets to see of a request: match, estimate terms, decode need, and who may take it at all."""

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
from conductor.core.ttft import prefill_terms
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

    def assess(self, state: RequestState, now: float, booked_s: FloatArray | None = None) -> Situation | None:
        """What a policy sees of a request, with `booked_s` more work on the prefill workers; None without any worker."""
        view, request = self._view, state.request
        if not view.prefill.ids or not view.decode.ids:
            return None
        match = self._index.match(request.block_hashes)
        terms = prefill_terms(request, match, view, self._config.block_tokens, now)
        if booked_s is not None:
            terms.queue_s += booked_s
        waiting, work_s = self._line()
        return Situation(
            request=request,
            terms=terms,
            need=self.decode_need(request),
            view=view,
            config=self._config,
            now=now,
            sequence=self.decisions,
            waited_s=now - state.arrived_s,
            waiting=waiting,
            prefill_eligible=eligible(view.prefill, request, state.avoid, view.prefill.accepts),
            decode_eligible=eligible(view.decode, request, state.avoid, view.decode.accepts),
            backlog_s=work_s / len(view.prefill),
        )

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
