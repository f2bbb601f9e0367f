"""Which holder (a worker's device pool, a node's DRAM or disk, the shared store) has which block, and the longest match of a
prompt on all of them at once.

A flat map from block hash to a bitmask of holders: the hash names the whole prefix, so no tree is needed. Two facts make a
match cheap. A holder is *closed*: where it has a block, it has all ancestors, since eviction takes leaves first and reports
come in order. So the bitmask only loses bits along a prompt, and if it is equal at two depths it is equal between them:
bisection finds the few depths at which it shrinks, whatever the length of the prompt and the number of holders. A
holder that does not promise closure (an engine that we do not own) is declared so, and its match is verified block by block.

Expected blocks (dispatched, not yet reported) are kept as whole chains from the root, apart from confirmed ones, and count as
long as their chain stands: until it is confirmed, given up or expired (I11).

Nothing pauses: the map grows by small steps (`block_map.py`), and a holder that is gone vanishes by one bit of `_live`, while
its bits are swept out of the map a piece at a time by later calls.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from conductor.core.block_map import BlockMap
from conductor.core.expected_prefixes import ExpectedPrefixes
from conductor.core.types import BlockHash, Holder, InvariantError

IntArray = npt.NDArray[np.int32]

FEW_BITS = 6
CACHED = 4096


class PrefixMatch(NamedTuple):
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
    def __init__(self, blocks: BlockMap | None = None) -> None:
        self._blocks = blocks or BlockMap()
        self._slots: dict[Holder, _Slot] = {}
        self._free_numbers: list[int] = []
        self._numbers: list[int] = []  # the slot number that each bit stands for
        self._free_bits: list[int] = []
        self._live = 0
        self._unclosed = 0
        self._expected = ExpectedPrefixes()
        self._partings: dict[BlockHash, int] = {}  # a guess for each root; verified whenever it is used
        self._positions: dict[int, npt.NDArray[np.int64]] = {}  # slot numbers of a mask, for masks that come up often
        self._retired: dict[int, int] = {}  # bits being swept out, and how many pieces of the map are still to be visited
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
        mask = self._blocks.get(block) & self._live
        found = [holder for holder, slot in self._slots.items() if mask & slot.mask]
        return tuple(sorted(found, key=lambda holder: (holder.tier, holder.owner)))

    @property
    def num_blocks(self) -> int:
        """Blocks in the map, those of holders that are gone included until they are swept."""
        return self._blocks.count

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
        if parent is not None and not self._blocks.get(parent) & bit:
            return False
        add = self._blocks.add
        slot.claims += sum([add(block, bit) for block in blocks])
        self._blocks.grow(self._live)
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
        discard, bit = self._blocks.discard, slot.mask
        slot.claims -= sum([discard(block, bit) for block in blocks])
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
        if slot is not None and blocks and not self._blocks.get(blocks[-1]) & slot.mask:
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
        """Find the depths at which the bitmask shrinks, by bisection from one to the next."""
        shards, high_bits, low_bits = self._blocks.shards, self._blocks.high, self._blocks.low
        total, num_shards = len(hashes), len(shards)
        depths = np.zeros(len(self._slots) + len(self._free_numbers), dtype=np.int32)
        mask = self._blocks.get(hashes[0]) & self._live if hashes else 0
        low, high, kept = self._usual_first_loss(hashes, mask)
        parting = 0
        while mask:  # its slots have the first `low` blocks; at `high` only those in `kept` are left
            while low < high:
                middle = (low + high) >> 1
                block = hashes[middle]
                position = block & high_bits
                if position >= num_shards:
                    position &= low_bits
                here = shards[position].get(block, 0) & mask
                if here == mask:
                    low = middle + 1
                else:
                    high, kept = middle, here
            self._write(depths, mask ^ kept, low)
            parting = parting or low
            mask, high, kept, low = kept, total, 0, low + 1
        if parting:
            self._partings[hashes[0]] = parting
        return depths

    def _usual_first_loss(self, hashes: Sequence[BlockHash], mask: int) -> tuple[int, int, int]:
        """Bounds of the first depth at which a slot of `mask` drops out, and what is left at the upper one.

        Prompts that share a root mostly part at the same depth, the end of a system prompt, so two look-ups there are worth
        more than a bisection of the whole.
        """
        total = len(hashes)
        if not mask:
            return 0, 0, 0
        if len(self._partings) > CACHED:
            self._partings.clear()
        depth = self._partings.get(hashes[0], 0)
        if depth < 1 or depth >= total or self._blocks.get(hashes[depth - 1]) & mask != mask:
            return 1, total, 0
        here = self._blocks.get(hashes[depth]) & mask
        return (depth + 1, total, 0) if here == mask else (depth, depth, here)

    def _write(self, depths: IntArray, mask: int, depth: int) -> None:
        """Set the depth of every slot in `mask`."""
        if mask.bit_count() > FEW_BITS:
            depths[self._slots_of(mask)] = depth
            return
        numbers = self._numbers
        while mask:
            lowest = mask & -mask
            depths[numbers[lowest.bit_length() - 1]] = depth
            mask ^= lowest

    def _slots_of(self, mask: int) -> npt.NDArray[np.int64]:
        positions = self._positions.get(mask)
        if positions is None:
            octets = np.frombuffer(mask.to_bytes((len(self._numbers) + 7) // 8, "little"), dtype=np.uint8)
            bits = np.flatnonzero(np.unpackbits(octets, bitorder="little"))
            positions = np.asarray(self._numbers, dtype=np.int64)[bits]
            if len(self._positions) >= CACHED:
                self._positions.clear()
            self._positions[mask] = positions
        return positions

    def _verify(self, depths: IntArray, hashes: Sequence[BlockHash]) -> None:
        """Walk the claims of slots that promise no closure block by block."""
        for slot in self._slots.values():
            if not slot.closed:
                has = (self._blocks.get(block) & slot.mask for block in hashes)
                depths[slot.number] = next((depth for depth, held in enumerate(has) if not held), len(hashes))

    # upkeep

    def sweep(self) -> None:
        """Take the bits of holders that are gone out of the next piece of the map. Every change calls it."""
        if not self._retired:
            return
        self._blocks.sweep(self._cursor, self._live)
        self._cursor = (self._cursor + 1) % len(self._blocks.shards)
        for bit in list(self._retired):
            self._retired[bit] -= 1
            if self._retired[bit] == 0:
                del self._retired[bit]
                self._free_bits.append(bit)

    def check(self) -> None:
        """Raise `InvariantError` if the map contradicts its own counts. O(blocks)."""
        live = sum(slot.mask for slot in self._slots.values())
        if live != self._live or live.bit_count() != len(self._slots):
            raise InvariantError(f"I8: live bits {self._live:b} are not those of the holders, {live:b}")
        claims = dict.fromkeys(self._slots, 0)
        known = live | sum(1 << bit for bit in self._retired)
        for shard in self._blocks.shards:
            for block, mask in shard.items():
                if not mask or mask & ~known:
                    raise InvariantError(f"I8: block {block:x} is claimed by nobody known: {mask:b}")
                for holder, slot in self._slots.items():
                    claims[holder] += bool(mask & slot.mask)
        counted = {holder: slot.claims for holder, slot in self._slots.items()}
        if claims != counted:
            raise InvariantError(f"claims {claims} differ from those counted, {counted}")
        self._expected.check()

    def _assign_bit(self, slot: _Slot) -> None:
        slot.bit = self._free_bits.pop() if self._free_bits else len(self._numbers)
        if slot.bit == len(self._numbers):
            self._numbers.append(0)
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
        self._retired[slot.bit] = len(self._blocks.shards)
