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
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from conductor.core.expected_prefixes import ExpectedPrefixes
from conductor.core.types import BlockHash, Holder, InvariantError

IntArray = npt.NDArray[np.int32]

SHARDS = 1 << 16
SWEPT_AT_ONCE = 16
FEW_BITS = 6
CACHED_MASKS = 4096


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """How many leading blocks of a prompt each slot has: confirmed or expected (`depths`), and confirmed alone."""

    depths: IntArray
    confirmed: IntArray


@dataclass(slots=True, eq=False)
class _Slot:
    """One holder. Its number is stable; its bit changes when everything that it holds is forgotten at once."""

    number: int
    closed: bool
    bit: int = -1
    mask: int = 0
    claims: int = 0


class PrefixIndex:
    def __init__(self, shards: int = SHARDS) -> None:
        self._shards: list[dict[BlockHash, int]] = [{} for _ in range(shards)]
        self._slots: dict[Holder, _Slot] = {}
        self._free_numbers: list[int] = []
        self._numbers = np.zeros(0, dtype=np.int64)  # the slot number that each bit stands for
        self._free_bits: list[int] = []
        self._live = 0
        self._unclosed = 0
        self._expected = ExpectedPrefixes()
        self._positions: dict[int, npt.NDArray[np.int64]] = {}  # slot numbers of a mask, for masks that come up often
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
        shards, count = self._shards, len(self._shards)
        for block in blocks:
            shard = shards[block % count]
            mask = shard.get(block, 0)
            if not mask & bit:
                shard[block] = mask | bit if mask else bit
                slot.claims += 1
        expected = self._expected.ends(slot.number)
        if expected:
            for block in [block for block in blocks if block in expected]:
                self._expected.confirm(slot.number, block)
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
        self._retire(slot)
        self._assign_bit(slot)
        self.store(holder, None, blocks)

    # expected blocks

    def expect(self, holder: Holder, blocks: Sequence[BlockHash], until_s: float) -> None:
        """Count the chain `blocks`, from the root on, as held until it is confirmed, given up, or `until_s` has passed."""
        slot = self._slots.get(holder)
        if slot is not None and blocks and not self._shard(blocks[-1]).get(blocks[-1], 0) & slot.mask:
            self._expected.add(slot.number, blocks, until_s)

    def unexpect(self, holder: Holder, blocks: Sequence[BlockHash]) -> None:
        """One of those who would have stored this chain does not."""
        slot = self._slots.get(holder)
        if slot is not None and blocks:
            self._expected.discard(slot.number, blocks[-1])

    def expire(self, now: float) -> None:
        self._expected.expire(now)

    # matching

    def match(self, block_hashes: Sequence[BlockHash]) -> PrefixMatch:
        """The longest match of a prompt on every slot, contiguous from its first block (I4)."""
        confirmed = self._depths(block_hashes)
        if self._unclosed:
            self._verify(confirmed, block_hashes)
        if not self._expected:
            return PrefixMatch(confirmed, confirmed)
        depths = confirmed.copy()
        for number, depth in self._expected.depths(block_hashes):
            if depth > depths[number]:
                depths[number] = depth
        return PrefixMatch(depths, confirmed)

    def _depths(self, hashes: Sequence[BlockHash]) -> IntArray:
        """Find the depths at which the bitmask shrinks: gallop ahead from the last one, then bisect."""
        shards, count, total = self._shards, len(self._shards), len(hashes)
        depths = np.zeros(len(self._slots) + len(self._free_numbers), dtype=np.int32)
        mask, depth = self._live, 0  # the slots in `mask` have the first `depth` blocks
        while mask and depth < total:
            low, high, step, kept = depth, total, 1, 0
            while low < high:
                probe = low + step - 1
                if probe >= high:
                    probe = high - 1
                block = hashes[probe]
                here = shards[block % count].get(block, 0) & mask
                if here == mask:
                    low = probe + 1
                    step += step
                else:
                    high, kept = probe, here
                    step = (high - low + 1) >> 1 or 1
            depth = low
            if depth:
                self._write(depths, mask ^ kept, depth)
            mask = kept
        return depths

    def _write(self, depths: IntArray, mask: int, depth: int) -> None:
        """Set the depth of every slot in `mask`."""
        if mask.bit_count() > FEW_BITS:
            depths[self._slots_of(mask)] = depth
            return
        while mask:
            lowest = mask & -mask
            depths[self._numbers[lowest.bit_length() - 1]] = depth
            mask ^= lowest

    def _slots_of(self, mask: int) -> npt.NDArray[np.int64]:
        positions = self._positions.get(mask)
        if positions is None:
            octets = np.frombuffer(mask.to_bytes((len(self._numbers) + 7) // 8, "little"), dtype=np.uint8)
            positions = self._numbers[np.flatnonzero(np.unpackbits(octets, bitorder="little"))]
            if len(self._positions) >= CACHED_MASKS:
                self._positions.clear()
            self._positions[mask] = positions
        return positions

    def _verify(self, depths: IntArray, hashes: Sequence[BlockHash]) -> None:
        """Walk the claims of slots that promise no closure block by block."""
        for slot in self._slots.values():
            if not slot.closed:
                has = (self._shard(block).get(block, 0) & slot.mask for block in hashes)
                depths[slot.number] = next((depth for depth, held in enumerate(has) if not held), len(hashes))

    # upkeep

    def sweep(self) -> None:
        """Take the bits of holders that are gone out of a few shards. Every change calls it."""
        if not self._retired:
            return
        gone = sum(1 << bit for bit in self._retired)
        for _ in range(min(SWEPT_AT_ONCE, len(self._shards))):
            shard = self._shards[self._cursor]
            for block, mask in [(block, mask) for block, mask in shard.items() if mask & gone]:
                if mask & ~gone:
                    shard[block] = mask & ~gone
                else:
                    del shard[block]
            self._cursor = (self._cursor + 1) % len(self._shards)
        for bit in list(self._retired):
            self._retired[bit] -= SWEPT_AT_ONCE
            if self._retired[bit] <= 0:
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
        self._expected.check()

    def _shard(self, block: BlockHash) -> dict[BlockHash, int]:
        return self._shards[block % len(self._shards)]

    def _assign_bit(self, slot: _Slot) -> None:
        slot.bit = self._free_bits.pop() if self._free_bits else len(self._numbers)
        if slot.bit == len(self._numbers):
            self._numbers = np.append(self._numbers, 0)
        self._numbers[slot.bit] = slot.number
        self._positions.clear()
        slot.mask, slot.claims = 1 << slot.bit, 0
        self._live |= slot.mask

    def _forget(self, slot: _Slot) -> None:
        self._expected.forget(slot.number)
        self._retire(slot)

    def _retire(self, slot: _Slot) -> None:
        """Let every confirmed claim vanish at once; the bit is swept out of the map and only then used again."""
        self._live &= ~slot.mask
        self._retired[slot.bit] = len(self._shards)
