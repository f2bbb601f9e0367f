"""Which holder (a worker's device pool, a node's DRAM or disk, the shared store) has which block, and the longest match of a
prompt on all of them at once.

A flat map from block hash to a bitmask of holders: the hash names the whole prefix, so no tree is needed. Two facts make a
match cheap. A holder is *closed*: where it has a block, it has all ancestors, since eviction takes leaves first and reports
come in order. So the bitmask only loses bits along a prompt, and if it is equal at two depths it is equal between them: a
galloping search finds the few depths at which it shrinks, whatever the length of the prompt and the number of holders. A
holder that does not promise closure (an engine that we do not own) is declared so, and its match is verified block by block.

Expected blocks (dispatched, not yet reported) are kept as whole chains from the root, apart from confirmed ones, and count as
long as their chain stands: until it is confirmed, given up or expired (I11).

Nothing pauses: the map is split into shards small enough to grow in a millisecond, keys and values are plain integers that
the garbage collector does not visit, and a holder that is gone vanishes by one bit of `_live`, while its bits are
swept out of the map a shard at a time by later calls.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from conductor.core.types import BlockHash, Holder, InvariantError

IntArray = npt.NDArray[np.int32]

SHARDS = 4096
FEW_BITS = 8


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """How many leading blocks of a prompt each slot has: confirmed or expected (`depths`), and confirmed alone."""

    depths: IntArray
    confirmed: IntArray


@dataclass(slots=True)
class _Chain:
    blocks: tuple[BlockHash, ...]
    until_s: float
    count: int = 1


@dataclass(slots=True, eq=False)
class _Slot:
    """One holder. Its number is stable; its bit changes when everything that it holds is forgotten at once."""

    number: int
    closed: bool
    bit: int = -1
    mask: int = 0
    claims: int = 0
    chains: dict[BlockHash, _Chain] = field(default_factory=dict)


class PrefixIndex:
    def __init__(self, shards: int = SHARDS) -> None:
        self._shards: list[dict[BlockHash, int]] = [{} for _ in range(shards)]
        self._slots: dict[Holder, _Slot] = {}
        self._free_numbers: list[int] = []
        self._numbers = np.zeros(0, dtype=np.int64)  # the slot number that each bit stands for
        self._free_bits: list[int] = []
        self._live = 0
        self._unclosed = 0
        self._expected: dict[BlockHash, int] = {}
        self._expected_counts: dict[tuple[int, BlockHash], int] = {}
        self._retired: dict[int, int] = {}  # bits being swept out, and how many shards still have to be visited
        self._cursor = 0

    # holders

    def add(self, holder: Holder, *, closed: bool = True) -> int:
        """The slot number of a holder, which is the position of its depth in a match. Idempotent."""
        slot = self._slots.get(holder)
        if slot is None:
            number = self._free_numbers.pop() if self._free_numbers else len(self._slots)
            slot = self._slots[holder] = _Slot(number, closed)
            self._unclosed += not closed
            self._assign_bit(slot)
        return slot.number

    def slot(self, holder: Holder) -> int:
        return self._slots[holder].number

    def discard(self, holder: Holder) -> None:
        """The holder is gone, and with it every claim (I8)."""
        slot = self._slots.pop(holder, None)
        if slot is not None:
            self._forget(slot)
            self._unclosed -= not slot.closed
            self._free_numbers.append(slot.number)

    def clear(self, holder: Holder) -> None:
        """The holder lives and has nothing left, expectations included."""
        slot = self._slots.get(holder)
        if slot is not None:
            self._forget(slot)
            self._assign_bit(slot)

    def holders(self, block: BlockHash) -> tuple[Holder, ...]:
        """Who has a block for certain, fastest tier first."""
        mask = self._shard(block).get(block, 0) & self._live
        found = [holder for holder, slot in self._slots.items() if mask & slot.mask]
        return tuple(sorted(found, key=lambda holder: (holder.tier, holder.owner)))

    @property
    def num_blocks(self) -> int:
        """Blocks in the map, those of holders that are gone included until they are swept."""
        return sum(map(len, self._shards))

    def num_claims(self, holder: Holder) -> int:
        """How many blocks a holder has."""
        slot = self._slots.get(holder)
        return 0 if slot is None else slot.claims

    # confirmed blocks

    def store(self, holder: Holder, parent: BlockHash | None, blocks: Sequence[BlockHash]) -> bool:
        """Claim `blocks`, each the child of the one before, for a holder. False if it does not have `parent`: then a report is
        missing, and nothing is claimed."""
        slot = self._slots[holder]
        bit = slot.mask
        if parent is not None and not self._shard(parent).get(parent, 0) & bit:
            return False
        shards, count, chains = self._shards, len(self._shards), slot.chains
        for block in blocks:
            shard = shards[block % count]
            mask = shard.get(block, 0)
            if not mask & bit:
                shard[block] = mask | bit if mask else bit
                slot.claims += 1
            if chains and block in chains:
                self._drop_chain(slot, block)
        self.sweep()
        return True

    def remove(self, holder: Holder, blocks: Iterable[BlockHash]) -> None:
        """The holder no longer has these blocks; unknown ones are ignored."""
        slot = self._slots.get(holder)
        if slot is None:
            return
        bit, shards, count = slot.mask, self._shards, len(self._shards)
        for block in blocks:
            shard = shards[block % count]
            mask = shard.get(block, 0)
            if mask & bit:
                slot.claims -= 1
                if mask == bit:
                    del shard[block]
                else:
                    shard[block] = mask ^ bit
        self.sweep()

    def replace(self, holder: Holder, blocks: Sequence[BlockHash]) -> None:
        """The holder has exactly `blocks`. Expectations stay: what was dispatched is not in a snapshot yet."""
        slot = self._slots[holder]
        chains = list(slot.chains.values())
        self.clear(holder)
        self.store(holder, None, blocks)
        for chain in chains:
            for _ in range(chain.count):
                self.expect(holder, chain.blocks, chain.until_s)

    # expected blocks

    def expect(self, holder: Holder, blocks: Sequence[BlockHash], until_s: float) -> None:
        """Count the chain `blocks`, from the root on, as held until it is confirmed, given up, or `until_s` has passed."""
        slot = self._slots.get(holder)
        if slot is None or not blocks or self._shard(blocks[-1]).get(blocks[-1], 0) & slot.mask:
            return
        chain = slot.chains.get(blocks[-1])
        if chain is not None:
            chain.count += 1
            chain.until_s = max(chain.until_s, until_s)
            return
        slot.chains[blocks[-1]] = _Chain(tuple(blocks), until_s)
        for block in blocks:
            key = slot.bit, block
            self._expected_counts[key] = self._expected_counts.get(key, 0) + 1
            self._expected[block] = self._expected.get(block, 0) | slot.mask

    def unexpect(self, holder: Holder, blocks: Sequence[BlockHash]) -> None:
        """One of those who would have stored this chain does not."""
        slot = self._slots.get(holder)
        chain = slot.chains.get(blocks[-1]) if slot is not None and blocks else None
        if slot is None or chain is None:
            return
        chain.count -= 1
        if chain.count == 0:
            self._drop_chain(slot, blocks[-1])

    def expire(self, now: float) -> None:
        for slot in self._slots.values():
            for last in [last for last, chain in slot.chains.items() if chain.until_s < now]:
                self._drop_chain(slot, last)

    # matching

    def match(self, block_hashes: Sequence[BlockHash]) -> PrefixMatch:
        """The longest match of a prompt on every slot, contiguous from its first block (I4)."""
        confirmed = self._depths(block_hashes, {})
        depths = self._depths(block_hashes, self._expected) if self._expected else confirmed
        return PrefixMatch(depths, confirmed)

    def _depths(self, hashes: Sequence[BlockHash], expected: dict[BlockHash, int]) -> IntArray:
        depths = np.zeros(len(self._slots) + len(self._free_numbers), dtype=np.int32)
        mask, depth = self._live, 0  # the slots in `mask` have the first `depth` blocks
        while mask and depth < len(hashes):
            depth = self._first_loss(hashes, depth, mask, expected)
            kept = mask & self._held_at(hashes[depth], expected) if depth < len(hashes) else 0
            if depth:
                self._write(depths, mask & ~kept, depth)
            mask = kept
        if self._unclosed:
            self._verify(depths, hashes, expected)
        return depths

    def _held_at(self, block: BlockHash, expected: dict[BlockHash, int]) -> int:
        return self._shard(block).get(block, 0) | expected.get(block, 0)

    def _first_loss(self, hashes: Sequence[BlockHash], start: int, mask: int, expected: dict[BlockHash, int]) -> int:
        """The first depth at or after `start` whose block some slot of `mask` lacks: gallop ahead, then bisect."""
        shards, count = self._shards, len(self._shards)
        low, high, step = start, len(hashes), 1
        while low < high:
            probe = min(low + step, high) - 1
            block = hashes[probe]
            here = shards[block % count].get(block, 0)
            if expected:
                here |= expected.get(block, 0)
            if here & mask == mask:
                low = probe + 1
                step *= 2
            else:
                high = probe
                step = max(1, (high - low + 1) // 2)
        return low

    def _write(self, depths: IntArray, mask: int, depth: int) -> None:
        """Set the depth of every slot in `mask`."""
        if mask.bit_count() > FEW_BITS:
            octets = np.frombuffer(mask.to_bytes((len(self._numbers) + 7) // 8, "little"), dtype=np.uint8)
            depths[self._numbers[np.flatnonzero(np.unpackbits(octets, bitorder="little"))]] = depth
            return
        while mask:
            lowest = mask & -mask
            depths[self._numbers[lowest.bit_length() - 1]] = depth
            mask ^= lowest

    def _verify(self, depths: IntArray, hashes: Sequence[BlockHash], expected: dict[BlockHash, int]) -> None:
        """Walk the claims of slots that promise no closure block by block."""
        for slot in self._slots.values():
            if not slot.closed:
                has = (self._held_at(block, expected) & slot.mask for block in hashes)
                depths[slot.number] = next((depth for depth, held in enumerate(has) if not held), len(hashes))

    # upkeep

    def sweep(self) -> None:
        """Take the bits of holders that are gone out of one shard. Every change calls it."""
        if not self._retired:
            return
        gone = sum(1 << bit for bit in self._retired)
        shard = self._shards[self._cursor]
        for block, mask in [(block, mask) for block, mask in shard.items() if mask & gone]:
            if mask & ~gone:
                shard[block] = mask & ~gone
            else:
                del shard[block]
        self._cursor = (self._cursor + 1) % len(self._shards)
        for bit in list(self._retired):
            self._retired[bit] -= 1
            if not self._retired[bit]:
                del self._retired[bit]
                self._free_bits.append(bit)

    def check(self) -> None:
        """Raise `InvariantError` if the map contradicts its own counts. O(blocks)."""
        live = sum(slot.mask for slot in self._slots.values())
        if live != self._live or live.bit_count() != len(self._slots):
            raise InvariantError(f"I8: live bits {self._live:b} are not those of the holders, {live:b}")
        claims = dict.fromkeys(self._slots, 0)
        known = live | sum(1 << bit for bit in self._retired)
        for shard in self._shards:
            for block, mask in shard.items():
                if not mask or mask & ~known:
                    raise InvariantError(f"I8: block {block:x} is claimed by nobody known: {mask:b}")
                for holder, slot in self._slots.items():
                    claims[holder] += bool(mask & slot.mask)
        counted = {holder: slot.claims for holder, slot in self._slots.items()}
        if claims != counted:
            raise InvariantError(f"claims {claims} differ from those counted, {counted}")
        self._check_expected()

    def _check_expected(self) -> None:
        counts: dict[tuple[int, BlockHash], int] = {}
        masks: dict[BlockHash, int] = {}
        for slot in self._slots.values():
            for chain in slot.chains.values():
                for block in chain.blocks:
                    counts[slot.bit, block] = counts.get((slot.bit, block), 0) + 1
                    masks[block] = masks.get(block, 0) | slot.mask
        if counts != self._expected_counts or masks != self._expected:
            raise InvariantError("I11: expected blocks differ from the chains that they come from")

    def _shard(self, block: BlockHash) -> dict[BlockHash, int]:
        return self._shards[block % len(self._shards)]

    def _assign_bit(self, slot: _Slot) -> None:
        slot.bit = self._free_bits.pop() if self._free_bits else len(self._numbers)
        if slot.bit == len(self._numbers):
            self._numbers = np.append(self._numbers, 0)
        self._numbers[slot.bit] = slot.number
        slot.mask, slot.claims = 1 << slot.bit, 0
        self._live |= slot.mask

    def _forget(self, slot: _Slot) -> None:
        for last in list(slot.chains):
            self._drop_chain(slot, last)
        self._live &= ~slot.mask
        self._retired[slot.bit] = len(self._shards)

    def _drop_chain(self, slot: _Slot, last: BlockHash) -> None:
        for block in slot.chains.pop(last).blocks:
            key = slot.bit, block
            self._expected_counts[key] -= 1
            if not self._expected_counts[key]:
                del self._expected_counts[key]
                self._expected[block] ^= slot.mask
                if not self._expected[block]:
                    del self._expected[block]
