"""Runs a model over paged KV: prompts by chunk from the longest cached prefix, decode in batches, KV in and out by block.

Synchronous and device-agnostic. It computes when it is told to and keeps no queue: what is computed next is planned in
`batching.py` and carried out by the actors. One thread computes; a sequence belongs to one caller at a time. Each full block is
named as soon as it is computed, generated ones too, so a conversation finds its own answer in the cache at its next turn. The
last token of a prompt is always computed, because its logits are what the prompt is computed for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from conductor.core.hashing import extend
from conductor.core.types import BlockHash
from models.base import CausalLM, ForwardBatch
from models.prompt_lookup import guess_next
from models.sampling import SampledToken, TokenHistory, has_penalty, sample
from workers.block_pool import BlockId, OutOfBlocks
from workers.device_cache import DeviceCache, Fill
from workers.needed_state import needed_parts, replayed_blocks
from workers.sequence import KVSequence, Prompt

Extend: TypeAlias = Callable[[BlockHash, bytes], BlockHash]
OnLayer: TypeAlias = Callable[[int], None]


class Engine:
    """A model and its device cache. `extend(parent, tokens as little-endian int32)` hashes a block. `replay_windows`: how many
    windows are replayed to rebuild window state that is missing, by default as many as make it exact."""

    def __init__(self, model: CausalLM, cache: DeviceCache, extend: Extend = extend, replay_windows: int | None = None) -> None:
        self.model = model
        self.cache = cache
        self.replayed_blocks = replayed_blocks(model.layout, cache.block_tokens, replay_windows)
        self._extend = extend
        self._device = cache.paged.layers[0].device

    @property
    def max_sequence_tokens(self) -> int:
        """The longest sequence, prompt and output, that fits the model's context and the whole pool."""
        return min(self.model.max_context, self.cache.num_blocks * self.cache.block_tokens)

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.cache.block_tokens)

    # --- the life of a sequence ---------------------------------------------------------------------------------------

    def begin(self, prompt: Prompt) -> KVSequence | OutOfBlocks:
        """Reserve blocks for the whole prompt, the longest cached prefix among them. All but that prefix is to be computed, if
        there are `spare` blocks after a `rebuild`."""
        reusable = (len(prompt.tokens) - 1) // self.cache.block_tokens
        if self.replayed_blocks:
            found = self.cache.reserve_bare(prompt.hashes[:reusable], self.blocks_for(len(prompt.tokens)), self.replayed_blocks)
            if found is not None:
                table, cached, spare = found
                return self._sequence(prompt, table, cached, spare)
        return self._reserve(prompt, reusable)

    def begin_again(self, sequence: KVSequence) -> KVSequence | OutOfBlocks:
        """The same for a sequence whose blocks were given back while it decoded: everything but its last token needs KV."""
        known = sequence.tokens[:-1]
        self._extend_hashes(sequence, len(known) // self.cache.block_tokens)
        reserved = self.cache.reserve(sequence.hashes, self.blocks_for(len(sequence.tokens)))
        if isinstance(reserved, OutOfBlocks):
            return reserved
        table, held = reserved
        computed = held * self.cache.block_tokens
        return KVSequence(
            sequence.prompt, sequence.tokens, sequence.hashes, table, computed, held, reused_tokens=sequence.reused_tokens
        )

    def adopt(self, prompt: Prompt) -> KVSequence | OutOfBlocks:
        """Reserve blocks for a prompt whose KV comes from elsewhere; what is cached here already need not come."""
        return self._reserve(prompt, len(prompt.hashes))

    def _reserve(self, prompt: Prompt, reusable: int) -> KVSequence | OutOfBlocks:
        reserved = self.cache.reserve(prompt.hashes[:reusable], self.blocks_for(len(prompt.tokens)))
        return reserved if isinstance(reserved, OutOfBlocks) else self._sequence(prompt, *reserved, [])

    def _sequence(self, prompt: Prompt, table: list[BlockId], held: int, spare: list[BlockId]) -> KVSequence:
        cached = held * self.cache.block_tokens
        tokens, hashes = list(prompt.tokens), list(prompt.hashes)
        return KVSequence(prompt, tokens, hashes, table, cached, held, reused_tokens=cached, spare=spare)

    def finish(self, sequence: KVSequence) -> None:
        """Give the blocks back; named ones stay cached. Once only a sequence."""
        self.cache.release([*sequence.table, *sequence.spare])
        sequence.table, sequence.spare = [], []

    # --- computing ----------------------------------------------------------------------------------------------------

    def rebuild(self, sequence: KVSequence) -> None:
        """Compute again what later tokens see of the reused prefix in window layers, from its global state.

        In spare blocks, since cached ones are others' too. What of it is right goes into the cached ones, if nobody has done so
        meanwhile; the rest only led up to it.
        """
        size, named, replayed = self.cache.block_tokens, sequence.named, len(sequence.spare)
        first = named - replayed
        self.cache.copy(sequence.table[first:named], sequence.spare)
        table = [*sequence.table[:first], *sequence.spare]
        token_ids = torch.tensor(sequence.tokens[first * size : named * size], device=self._device)
        batch = ForwardBatch(token_ids, [replayed * size], [first * size], [table], logits=False, replay=True)
        self.model.forward(batch, self.cache.paged)
        sequence.spare = []
        self.cache.commit(table, named - self.cache.window_blocks, sequence.hashes[:named])
        self.cache.release(table[first:])

    def prefill_chunk(self, sequence: KVSequence, tokens: int, on_layer: OnLayer | None = None) -> Tensor | None:
        """Compute the next `tokens` tokens and name the blocks they fill. With the sequence's last token, its logits [vocab].

        Without it there is nothing to wait for: later stages of the model may still be at work, in the order of the chunks.
        """
        assert not sequence.spare, "what is to be computed sees window state that has not been rebuilt"
        start = sequence.computed
        new = sequence.tokens[start : start + tokens]
        ends = start + len(new) == len(sequence.tokens)
        token_ids = torch.tensor(new, device=self._device)
        batch = ForwardBatch(token_ids, [len(new)], [start], [list(sequence.table)], logits=ends)
        logits = self.model.forward(batch, self.cache.paged, on_layer=on_layer)
        sequence.computed += len(new)
        self._name_full_blocks(sequence)
        return logits[0] if ends else None

    def first_token(self, sequence: KVSequence, logits: Tensor) -> SampledToken:
        """Draw the token that follows a prompt whose last logits are `logits`, and append it."""
        return self._draw([sequence], logits[None])[0]

    def grow(self, sequence: KVSequence) -> bool:
        """Make room for the KV of one more token; False when there is no block."""
        if sequence.computed < len(sequence.table) * self.cache.block_tokens:
            return True
        fresh = self.cache.allocate(1)
        if isinstance(fresh, OutOfBlocks):
            return False
        sequence.table += fresh
        return True

    def decode_step(self, sequences: Sequence[KVSequence]) -> list[SampledToken]:
        """Compute the pending token of every sequence, which all have room for it, and draw and append the next ones."""
        batch = ForwardBatch(
            token_ids=torch.tensor([sequence.tokens[sequence.computed] for sequence in sequences], device=self._device),
            query_lens=[1] * len(sequences),
            context_lens=[sequence.computed for sequence in sequences],
            block_tables=[sequence.table for sequence in sequences],
        )
        logits = self.model.forward(batch, self.cache.paged)
        for sequence in sequences:
            sequence.computed += 1
            self._name_full_blocks(sequence)
        return self._draw(sequences, logits)

    def speculative_step(self, sequences: Sequence[KVSequence], lookahead: int) -> list[list[SampledToken]]:
        """A decode step that also tries up to `lookahead` guessed tokens of each sequence: what is drawn, at least one token.

        The first is appended; the caller takes the others, in order and as far as it wants them, by `accept`. A guess is a row
        like any other sequence's, on the same blocks, so what is drawn is what single steps draw.
        """
        guesses = [self._guess(sequence, lookahead) for sequence in sequences]
        rows = [
            (sequence, offset) for sequence, guess in zip(sequences, guesses, strict=True) for offset in range(len(guess) + 1)
        ]
        pending = [[sequence.tokens[sequence.computed], *guess] for sequence, guess in zip(sequences, guesses, strict=True)]
        batch = ForwardBatch(
            token_ids=torch.tensor([token for tokens in pending for token in tokens], device=self._device),
            query_lens=[1] * len(rows),
            context_lens=[sequence.computed + offset for sequence, offset in rows],
            block_tables=[sequence.table for sequence, _ in rows],
        )
        drawn = iter(
            self._sample([(s, len(s.tokens) + offset) for s, offset in rows], self.model.forward(batch, self.cache.paged))
        )
        results = [confirmed(guess, [next(drawn) for _ in range(len(guess) + 1)]) for guess in guesses]
        for sequence, tokens in zip(sequences, results, strict=True):
            self.accept(sequence, tokens[0])
        return results

    def accept(self, sequence: KVSequence, token: SampledToken) -> None:
        """Append a token drawn for `sequence`; the one before it has its KV."""
        sequence.computed += 1
        self._name_full_blocks(sequence)
        sequence.tokens.append(token.token_id)

    def _guess(self, sequence: KVSequence, lookahead: int) -> list[int]:
        """Guesses for which there is room; none for rules that depend on what was drawn before."""
        if has_penalty(sequence.prompt.sampling):
            return []
        held = min(len(sequence.table) * self.cache.block_tokens, self.model.max_context)
        return guess_next(sequence.tokens, min(lookahead, held - sequence.computed - 1))

    def _draw(self, sequences: Sequence[KVSequence], logits: Tensor) -> list[SampledToken]:
        drawn = self._sample([(sequence, len(sequence.tokens)) for sequence in sequences], logits)
        for sequence, token in zip(sequences, drawn, strict=True):
            sequence.tokens.append(token.token_id)
        return drawn

    def _sample(self, rows: Sequence[tuple[KVSequence, int]], logits: Tensor) -> list[SampledToken]:
        """What each row's rules draw for a position of its sequence."""
        rules = [sequence.prompt.sampling for sequence, _ in rows]
        histories = [_history(sequence) for sequence, _ in rows] if any(map(has_penalty, rules)) else None
        return sample(logits, rules, [position for _, position in rows], histories)

    # --- KV in and out ------------------------------------------------------------------------------------------------

    def receive(self, sequence: KVSequence, blocks: range, fill: Fill, layers: range | None = None) -> None:
        """Have `fill` bring KV from elsewhere into `blocks` of an adopted sequence, except what it has; all layers or some."""
        skip = max(0, sequence.named - blocks.start)
        if skip < len(blocks):
            self.cache.fill(sequence.table[blocks.start + skip : blocks.stop], lambda into: fill(into, skip), layers)
        chosen = range(self.model.layout.num_layers) if layers is None else layers
        sequence.received.update((block, layer) for block in blocks for layer in chosen)

    def missing_blocks(self, sequence: KVSequence) -> list[int]:
        """Blocks of an adopted sequence that are neither cached nor received in the layers in which they are needed."""
        wanted = self._wanted(sequence)
        return sorted({block for block, layer in wanted - sequence.received})

    def _wanted(self, sequence: KVSequence) -> set[tuple[int, int]]:
        """(block, layer) whose KV has to come for an adopted prompt: no window's state beyond what the next token sees."""
        layout, tokens, size = self.model.layout, len(sequence.tokens), self.cache.block_tokens
        whole = range(sequence.named, len(sequence.table))
        parts = needed_parts(layout, tokens, size, whole, range(layout.num_layers))
        return {(block, layer) for blocks, layers in parts for block in blocks for layer in layers}

    def complete(self, sequence: KVSequence, first_token: int) -> None:
        """All KV of an adopted prompt is here: name its blocks, if it came in all layers, and let it decode from its first
        token."""
        missing = self.missing_blocks(sequence)
        if missing:
            raise ValueError(f"blocks {missing} of {len(sequence.table)} have not been received")
        coming, layers = range(sequence.named, len(sequence.table)), range(self.model.layout.num_layers)
        sequence.in_part = any((block, layer) not in sequence.received for block in coming for layer in layers)
        sequence.computed = len(sequence.tokens)
        self._name_full_blocks(sequence)
        sequence.tokens.append(first_token)

    # --- names --------------------------------------------------------------------------------------------------------

    def _name_full_blocks(self, sequence: KVSequence) -> None:
        full = sequence.computed // self.cache.block_tokens
        if full > sequence.named and not sequence.in_part:
            self._extend_hashes(sequence, full)
            self.cache.commit(sequence.table, sequence.named, sequence.hashes[:full])
            sequence.named = full

    def _extend_hashes(self, sequence: KVSequence, blocks: int) -> None:
        size = self.cache.block_tokens
        while len(sequence.hashes) < blocks:
            position = len(sequence.hashes)
            parent = sequence.hashes[-1] if sequence.hashes else sequence.prompt.root
            tokens = np.asarray(sequence.tokens[position * size : (position + 1) * size], dtype="<i4")
            sequence.hashes.append(self._extend(parent, tokens.tobytes()))


def confirmed(guess: Sequence[int], drawn: Sequence[SampledToken]) -> list[SampledToken]:
    """The drawn tokens that hold: each was computed after guesses that had turned out right."""
    right = 0
    while right < len(guess) and drawn[right].token_id == guess[right]:
        right += 1
    return list(drawn[: right + 1])


def _history(sequence: KVSequence) -> TokenHistory:
    split = len(sequence.prompt.tokens) - sequence.prompt.emitted_tokens
    return TokenHistory(prompt=sequence.tokens[:split], output=sequence.tokens[split:])
