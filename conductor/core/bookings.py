"""What is promised to requests in flight, kept in step with the belief about workers, links and caches.

A placement books prefill work, a flow on the links it pulls over, capacity on the decode worker, and the blocks that the
prefill worker is going to hold. Each is given back exactly once, when it is used up or when the attempt ends (I9).
"""

from __future__ import annotations

from conductor.core.cluster_view import ClusterView, Flow
from conductor.core.decode_timeline import DecodeTimeline
from conductor.core.prefill_pool import PrefillJob
from conductor.core.prefix_index import PrefixIndex
from conductor.core.requests import Phase, RequestState
from conductor.core.tbt import DecodeNeed
from conductor.core.types import Holder, Placement, Tier, WorkerId

EXPECTATION_GRACE_S = 30.0


class Bookings:
    def __init__(self, view: ClusterView, index: PrefixIndex) -> None:
        self._view = view
        self._index = index
        self.timeline = DecodeTimeline()

    def place(self, state: RequestState, placement: Placement, need: DecodeNeed, now: float) -> None:
        request, reuse = state.request, placement.reuse
        state.placement, state.placed_s = placement, now
        state.enter(Phase.PREFILL, now)
        job = PrefillJob(placement.ttft.work_s, request.prompt_tokens - reuse.reused_tokens)
        self._view.prefill.book(placement.prefill, request.id, job, now)
        if reuse.source is not None:
            state.pull = Flow(reuse.relay or reuse.source.owner, placement.prefill)
            self._view.open_flow(state.pull)
            if reuse.source.tier is Tier.SHARED:
                self._begin_read(state, placement, now)
        if placement.decode is not None:
            self.reserve(state, placement.decode, need)
        begin_s = now + placement.ttft.total_s - (now - state.arrived_s)
        self.timeline.expect(request.id, begin_s, begin_s + state.decode_s, need.context_tokens)
        until_s = now + placement.ttft.high_s + EXPECTATION_GRACE_S
        self._index.expect(Holder(placement.prefill, Tier.DEVICE), request.block_hashes, until_s)

    def reserve(self, state: RequestState, decode: WorkerId, need: DecodeNeed) -> None:
        """Hold capacity for prompt and expected output on the decode worker."""
        state.decode = decode
        self._view.decode.reserve(decode, state.request.id, need.blocks, need.context_tokens)

    def prefill_done(self, state: RequestState, now: float) -> None:
        """The prompt is computed: its worker is free of it, and nothing is pulled for it any more."""
        assert state.placement is not None
        self._view.prefill.release(state.placement.prefill, state.request.id, now)
        self._close_pull(state)
        state.enter(Phase.HANDOVER, now)

    def begin_handover(self, state: RequestState, now: float) -> None:
        """KV is on its way to the decode worker, unless that is where it already lies."""
        assert state.placement is not None
        assert state.decode is not None
        if state.decode == state.placement.prefill:
            self.begin_decode(state, now)
            return
        state.handover = Flow(state.placement.prefill, state.decode)
        self._view.open_flow(state.handover)

    def begin_decode(self, state: RequestState, now: float) -> None:
        self._close_handover(state)
        state.enter(Phase.DECODE, now)
        if state.decode is not None:
            until_s = now + state.decode_s
            self._view.decode.activate(state.decode, state.request.id, until_s)
            self.timeline.expect(state.request.id, now, until_s, state.request.prompt_tokens)
            self.measure_decode(state, now)

    def measure_decode(self, state: RequestState, now: float) -> None:
        """The request's next token comes from a step that begins here."""
        if state.phase is Phase.DECODE and state.decode is not None:
            state.decoding_since_s, state.decode_step_s = now, self._view.decode.step_s(state.decode)

    def release(self, state: RequestState, now: float) -> None:
        """Give back everything that the current attempt holds."""
        placement = state.placement
        if placement is None:
            return
        if placement.prefill in self._view.prefill:
            self._view.prefill.release(placement.prefill, state.request.id, now)
        self.timeline.forget(state.request.id)
        state.decoding_since_s = None
        if state.decode is not None:
            self._view.decode.release(state.decode, state.request.id)
        self._close_pull(state)
        self._close_handover(state)
        if state.phase is Phase.PREFILL:
            self._index.unexpect(Holder(placement.prefill, Tier.DEVICE), state.request.block_hashes)
        state.placement, state.decode = None, None

    def _begin_read(self, state: RequestState, placement: Placement, now: float) -> None:
        pool, reuse = self._view.prefill, placement.reuse
        nbytes = reuse.fetched_tokens * float(pool.kv_bytes_per_token[pool.row[placement.prefill]])
        self._view.storage.begin(state.request.id, reuse.relay or placement.prefill, nbytes, now)

    def prefill_began(self, state: RequestState) -> None:
        """Whatever was read for it from the shared store is there."""
        self._view.storage.end(state.request.id)

    def _close_pull(self, state: RequestState) -> None:
        self._view.storage.end(state.request.id)
        if state.pull is not None:
            self._view.close_flow(state.pull)
            state.pull = None

    def _close_handover(self, state: RequestState) -> None:
        if state.handover is not None:
            self._view.close_flow(state.handover)
            state.handover = None
