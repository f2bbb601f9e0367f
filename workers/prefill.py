"""The prefill worker: computes prompts in order, by chunk, and hands their KV over to the decode worker.

Prompts wait in order of arrival; one whose prefix is still being pulled lets others pass, and a pull that fails costs only
the computing, for a cached prefix is an optimisation and never the truth. KV is sent to the decode worker while the computing
goes on, one group of layers after the other (`outgoing.py`), so that little of it is left to wait for. The first token is
drawn here and goes straight to the gateway; a request that ends with it is never handed over. A prompt that finds no free
blocks waits; one that can never fit fails at once. (Mooncake FAST'25, section 5.1; chunked prefill: Sarathi-Serve, OSDI'24.)
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from conductor.core.events import FirstToken, PrefillFinished, PrefillStarted, RequestFinished
from conductor.core.messages import GenerationJob, TokenOutput
from conductor.core.types import SHARED_STORE, BlockHash, FinishReason, Holder, Placement, RequestId, WorkerId, WorkerLoad
from models.sampling import SampledToken
from workers.actor import WorkerActor, failure_text, quietly
from workers.assembly import Build, build_parts, node_of
from workers.batching import chunk_length, next_prompt
from workers.block_pool import OutOfBlocks
from workers.config import WorkerConfig
from workers.engine import OnLayer
from workers.jobs import HandoverPart, JobKey, finish_reason, job_key, last_output, prompt_of, refusal, token_output
from workers.kv_transfer.base import TransferError
from workers.needed_state import needed_parts
from workers.outgoing import Outgoing, Sender
from workers.sequence import KVSequence, Prompt

logger = logging.getLogger(__name__)

WARMUP_PREFILLS = 2


class DecodeCallFailed(Exception):
    """The decode worker did not take the hand-over."""


@dataclass(slots=True)
class _Entry:
    """One job from acceptance until its blocks are released."""

    job: GenerationJob
    placement: Placement
    prompt: Prompt
    decode_id: WorkerId | None = None
    decode: Any | None = None
    ready: bool = True
    cancelled: bool = False
    sequence: KVSequence | None = None
    compute_s: float = 0.0
    fetch_s: float | None = None
    outgoing: Outgoing | None = None
    kept_blocks: int = 0
    decode_known: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None

    @property
    def key(self) -> JobKey:
        return job_key(self.job)

    @property
    def ends_with_first_token(self) -> bool:
        return self.job.request.emitted_tokens + 1 >= self.job.sampling.max_tokens

    def choose(self, decode_id: WorkerId, decode: Any) -> None:
        self.decode_id, self.decode = decode_id, decode
        self.decode_known.set()


class PrefillWorker(WorkerActor):
    def __init__(self, config: WorkerConfig, build: Build = build_parts) -> None:
        super().__init__(config, build)
        self._queue: list[_Entry] = []
        self._computing: _Entry | None = None
        self._entries: dict[JobKey, _Entry] = {}
        self._finished_prefills = 0
        self._relayed_reads = self._failed_relays = 0
        self._sender = Sender(self.cache, self.transport, self.exchange, self._move, self._spawn, config.lease_s)

    # --- calls --------------------------------------------------------------------------------------------------------

    async def prefill(self, job: GenerationJob, placement: Placement, decode: Any | None, source: Any | None) -> None:
        """Accept a job. A repeated or cancelled attempt is ignored."""
        self._start()
        key = job_key(job)
        if key in self._entries or key in self._ended:
            return
        problem = refusal(job, self.engine)
        if problem is not None:
            self._fail(job, problem)
            return
        entry = _Entry(job, placement, prompt_of(job, self._parts.root_of(job.request.cache_domain)))
        if decode is not None and placement.decode is not None:
            self._choose(entry, placement.decode, decode)
        self._entries[key] = entry
        self._queue.append(entry)
        if placement.reuse.fetched_tokens > 0 and placement.reuse.source is not None:
            entry.ready = False
            entry.task = self._spawn(self._bring_prefix(entry, placement.reuse.source, source))
        self._wake.set()
        self._reporter.touch()

    async def choose_decode(self, request_id: RequestId, attempt: int, worker_id: WorkerId, decode: Any) -> None:
        """The decode worker that the placement had left open."""
        entry = self._entries.get((request_id, attempt))
        if entry is None:
            return
        if decode is None:
            self._fail(entry.job, f"decode worker {worker_id} is gone", worker_id)
            await self._abandon(entry)
        else:
            self._choose(entry, worker_id, decode)

    def _choose(self, entry: _Entry, worker_id: WorkerId, decode: Any) -> None:
        entry.choose(worker_id, decode)
        self._pairs.offering_to(worker_id, decode)

    async def cancel(self, request_id: RequestId, attempt: int) -> None:
        self._end((request_id, attempt))
        entry = self._entries.get((request_id, attempt))
        if entry is not None:
            self._emit(entry.job, last_output(entry.job, self.id, entry.job.request.emitted_tokens, FinishReason.CANCELLED))
            await self._abandon(entry)

    async def stats(self) -> dict[str, Any]:
        numbers = await super().stats()
        numbers |= {"relayed_reads": self._relayed_reads, "failed_relays": self._failed_relays}
        return numbers | {"queued": len(self._queue), "running": len(self._entries) - len(self._queue)}

    def _load(self) -> WorkerLoad:
        computing = self._computing
        remaining_s = 0.0
        if computing is not None and computing.sequence is not None:
            prompt_tokens = computing.job.request.prompt_tokens
            remaining_s = self._parts.profile.prefill_s(prompt_tokens, min(computing.sequence.computed, prompt_tokens))
        queued = [entry.job.request.prompt_tokens - entry.placement.reuse.reused_tokens for entry in self._queue]
        return WorkerLoad(
            queued_requests=len(self._queue),
            queued_prefill_tokens=sum(queued),
            running_prefill_remaining_s=remaining_s,
            free_blocks=self.cache.available,
            transport_fallbacks=self.transport.fallbacks,
        )

    # --- before computing ---------------------------------------------------------------------------------------------

    async def _bring_prefix(self, entry: _Entry, holder: Holder, source: Any | None) -> None:
        """Bring the prefix that the placement wants from where it lies. What does not come is computed."""
        reuse = entry.placement.reuse
        blocks = entry.job.request.block_hashes[: reuse.reused_tokens // self.config.block_tokens]
        began_s = time.perf_counter()
        if reuse.relay is not None:
            await self._read_through(reuse.relay, source, blocks)
        try:
            if self.cache.match(blocks) < len(blocks):
                await self._bring(holder, source, blocks)
        except Exception as error:
            logger.warning("request %s computes a prefix that was not fetched: %s", entry.job.request.id, failure_text(error))
        entry.fetch_s = time.perf_counter() - began_s
        entry.ready = True
        self._wake.set()

    async def _bring(self, holder: Holder, source: Any | None, blocks: Sequence[BlockHash]) -> None:
        if self._has_tier_of(holder):
            await self._restore(holder.tier, blocks)
        elif source is not None:
            await self._pull(source, blocks)

    async def _read_through(self, relay: WorkerId, source: Any | None, blocks: Sequence[BlockHash]) -> None:
        """Let a decode worker read the prefix from the shared store, and pull it from there. What does not come this way is
        still in the store."""
        try:
            if source is None:
                raise TransferError("it is gone")
            await self._pull(source, blocks)
        except Exception as error:
            self._failed_relays += 1
            logger.warning("%s reads from the shared store itself, for %s did not: %s", self.id, relay, failure_text(error))
        else:
            self._relayed_reads += 1

    def _has_tier_of(self, holder: Holder) -> bool:
        """Whether the holder is a tier that this worker reads itself."""
        return holder.tier in self.store.tiers and holder.owner in (SHARED_STORE, node_of(self.config))

    # --- computing ----------------------------------------------------------------------------------------------------

    async def _work(self) -> None:
        while True:
            self._wake.clear()
            position = next_prompt([entry.ready for entry in self._queue])
            entry = None if position is None else self._queue[position]
            if entry is None or not self._reserve(entry):
                await self._wake.wait()
                continue
            self._queue.remove(entry)
            self._computing = entry
            try:
                await self._compute_prompt(entry)
            except Exception as error:
                logger.exception("prefill of request %s broke", entry.job.request.id)
                self._fail(entry.job, failure_text(error))
                await self._let_go(entry)
            finally:
                self._computing = None
                self._reporter.touch()

    def _reserve(self, entry: _Entry) -> bool:
        sequence = self.engine.begin(entry.prompt)
        if isinstance(sequence, OutOfBlocks):
            return False
        entry.sequence = sequence
        return True

    async def _compute_prompt(self, entry: _Entry) -> None:
        sequence, request = entry.sequence, entry.job.request
        assert sequence is not None
        self._report(PrefillStarted(request.id, request.attempt, self.id, entry.fetch_s))
        if sequence.spare:
            entry.compute_s += await self._run(self._rebuild, sequence)
        self._begin_sending(entry, sequence)
        token: SampledToken | None = None
        while token is None and not entry.cancelled:
            token, seconds = await self._run(self._chunk, entry, sequence)
            entry.compute_s += seconds
            self._keep_new_blocks(entry, sequence)
        if token is None or entry.cancelled:
            await self._run(self.engine.model.settle)
            await self._let_go(entry)
        else:
            await self._finish_prompt(entry, sequence, token)

    def _keep_new_blocks(self, entry: _Entry, sequence: KVSequence) -> None:
        """Let the tiers below write what the last chunk has completed."""
        self.store.keep(sequence.hashes[: sequence.named], entry.job.request.traffic_class, sequence.named - entry.kept_blocks)
        entry.kept_blocks = sequence.named

    def _rebuild(self, sequence: KVSequence) -> float:
        began_s = time.perf_counter()
        self.engine.rebuild(sequence)
        return time.perf_counter() - began_s

    def _chunk(self, entry: _Entry, sequence: KVSequence) -> tuple[SampledToken | None, float]:
        """Compute one chunk; with the last one, draw the first token. Also the seconds that it took."""
        began_s = time.perf_counter()
        prompt_tokens = len(sequence.prompt.tokens)
        tokens = chunk_length(sequence.computed, prompt_tokens, self.config.chunk_tokens)
        logits = self.engine.prefill_chunk(sequence, tokens, self._sent_by_layer(entry, sequence, sequence.computed + tokens))
        token = None if logits is None else self.engine.first_token(sequence, logits)
        return token, time.perf_counter() - began_s

    async def _finish_prompt(self, entry: _Entry, sequence: KVSequence, token: SampledToken) -> None:
        job, request = entry.job, entry.job.request
        reason = finish_reason(sequence, token.token_id, self.engine)
        first = token_output(job, self.id, sequence, token, reason, reused_tokens=sequence.reused_tokens)
        warmup = self._finished_prefills < WARMUP_PREFILLS
        self._finished_prefills += 1
        self._report(
            FirstToken(request.id, request.attempt),
            PrefillFinished(request.id, request.attempt, self.id, sequence.reused_tokens, entry.compute_s, warmup),
        )
        if not self._emit(job, first):
            self._fail(job, f"nobody reads the outputs of channel {job.channel!r}")
            await self._let_go(entry)
        elif reason is not None:
            self._report(RequestFinished(request.id, request.attempt, sequence.output_tokens, reason))
            if entry.outgoing is not None and entry.outgoing.started and entry.decode is not None:
                self._spawn(quietly(entry.decode.cancel.remote(request.id, request.attempt)))
            await self._let_go(entry)
        else:
            entry.task = self._spawn(self._hand_over(entry, first))

    # --- hand-over ----------------------------------------------------------------------------------------------------

    def _begin_sending(self, entry: _Entry, sequence: KVSequence) -> None:
        """The reused prefix goes out at once."""
        if not entry.ends_with_first_token:
            tokens, size, layout = len(sequence.prompt.tokens), self.cache.block_tokens, self.engine.model.layout
            entry.outgoing = Outgoing(
                self._sender,
                lambda part: self._deliver_early(entry, part),
                lambda: entry.decode_id,
                lambda blocks, layers: needed_parts(layout, tokens, size, blocks, layers),
            )
            entry.outgoing.send_prefix(sequence.table, sequence.named, lambda: self._held_by_decode(entry))

    async def _held_by_decode(self, entry: _Entry) -> int:
        """How many of the prompt's first blocks the decode worker has set aside for it with their KV. Not knowing is no reason
        to fail: then all of it is sent."""
        await entry.decode_known.wait()
        assert entry.decode is not None
        try:
            held: int = await entry.decode.receive_parts.remote(entry.job, entry.placement, [])
        except Exception as error:
            logger.info("what is cached for request %s was not told: %s", entry.job.request.id, failure_text(error))
            return 0
        return held

    def _sent_by_layer(self, entry: _Entry, sequence: KVSequence, computed: int) -> OnLayer | None:
        """What sends the blocks that a chunk fills up to token `computed`, group by group; called in the compute thread."""
        outgoing = entry.outgoing
        last = computed == len(sequence.prompt.tokens)
        blocks = range(
            0 if outgoing is None else outgoing.sent_blocks,
            self.engine.blocks_for(computed) if last else computed // self.cache.block_tokens,
        )
        if outgoing is None or not blocks:
            return None
        outgoing.sent_blocks = blocks.stop
        ends = {group[-1]: group for group in outgoing.groups(len(blocks))}

        def send(layer: int) -> None:
            if layer in ends and not entry.cancelled:
                for part in outgoing.cut(sequence.table, blocks, ends[layer]):
                    self._in_loop(outgoing.send, part)

        return send

    async def _deliver_early(self, entry: _Entry, part: HandoverPart) -> bool:
        """Let the decode worker, if it is known already, take a part. One that it did not take is sent again at the end."""
        if entry.decode is None or entry.cancelled:
            return False
        try:
            await entry.decode.receive_parts.remote(entry.job, entry.placement, [part])
        except Exception as error:
            logger.info("an early part of request %s was not taken: %s", entry.job.request.id, failure_text(error))
            if isinstance(error, TransferError) and entry.decode_id is not None:
                self.transport.shun(entry.decode_id, part.ticket.transport, failure_text(error))
            return False
        return True

    async def _hand_over(self, entry: _Entry, first: TokenOutput) -> None:
        blamed: WorkerId | None = None
        try:
            async with asyncio.timeout(self.config.lease_s):
                await entry.decode_known.wait()
                await self._give_to_decode(entry, first)
        except TimeoutError:
            blamed = entry.decode_id
            self._fail(entry.job, f"the hand-over did not end within lease_s = {self.config.lease_s:g} s", blamed)
        except DecodeCallFailed as error:
            self._fail(entry.job, f"decode worker {entry.decode_id} did not take the hand-over: {error}", entry.decode_id)
        except Exception as error:
            self._fail(entry.job, f"the KV could not be offered: {failure_text(error)}")
        finally:
            self._end(entry.key)
            await self._let_go(entry)

    async def _give_to_decode(self, entry: _Entry, first: TokenOutput) -> None:
        assert entry.outgoing is not None
        assert entry.decode is not None
        rest = await entry.outgoing.rest()
        try:
            await entry.decode.accept_handover.remote(entry.job, entry.placement, first, rest)
        except Exception as error:
            raise DecodeCallFailed(failure_text(error)) from error

    # --- the end ------------------------------------------------------------------------------------------------------

    async def _abandon(self, entry: _Entry) -> None:
        """Stop a job wherever it is; if it is computing, the loop lets go of it after the current chunk."""
        entry.cancelled = True
        if entry.task is not None:
            entry.task.cancel()
        if entry is not self._computing:
            if entry in self._queue:
                self._queue.remove(entry)
            await self._let_go(entry)  # not left to the task, which may be cancelled before its first step

    async def _let_go(self, entry: _Entry) -> None:
        """Release blocks and offers, once no transfer thread reads them any more. Again changes nothing.

        Goes on when the caller is cancelled.
        """
        self._entries.pop(entry.key, None)
        self._end(entry.key)
        sequence, entry.sequence = entry.sequence, None
        if sequence is not None:
            await asyncio.shield(self._spawn(self._release(sequence, entry.outgoing)))

    async def _release(self, sequence: KVSequence, outgoing: Outgoing | None) -> None:
        if outgoing is not None:
            await outgoing.close()
        self.engine.finish(sequence)
        self._reporter.touch()
