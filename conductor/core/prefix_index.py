"""Which holder (a worker's device pool, a node's DRAM or disk, the shared store) has which block, and the longest match of a
prompt on all of them at once.

A flat map from block hash to a bitmask of holders: the hash names the whole prefix, so no tree is needed. Two facts make a
match cheap. A holder is *closed*: where it has a block, it has all ancestors, since eviction takes leaves first and reports
come in order. So the bitmask only loses bits along a prompt, and if it is equal at two depths it is equal between them:
bisection finds the few depths at which it shrinks, whatever the length of the prompt and the number of holders. Where a
prompt has so many of them that bisection would cost more than a walk along the prompt, the walk takes over.

Closure is a promise of the holder that no report can prove: a removal names no children, a snapshot no parents. So it is
spot-checked. Every eighth match looks at each eighth block that bisection jumped over, at an offset that moves on, and a holder
that lacks one is doubted: walked block by block until it is cleared or replaced. So is a holder whose reports have a gap
(`doubt`), and one that promises nothing (`closed=False`, an engine that we do not own), from its first match on. All such
holders share one walk.

Expected blocks (dispatched, not yet reported) are kept as whole chains from the root, apart from confirmed ones, and count as
long as their chain stands: until it is confirmed, given up or expired (I11).

Nothing pauses: the map grows by small steps (`block_map.py`), and a holder that is gone vanishes by one bit of `_live`, while
its bits are swept out of the map a piece at a time by later calls, in rounds over the whole map; a bit is used again only after
a round that began when nobody had it any more. A call costs no more than what it is given.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from conductor.core.block_map import BlockMap
from conductor.core.expected_prefixes import ExpectedPrefixes
from conductor.core.types import BlockHash, Holder, InvariantError

IntArray: TypeAlias = npt.NDArray[np.int32]
Loss: TypeAlias = tuple[int, int]  # a depth, and the bits of the slots that have just so many blocks

FEW_BITS = 6
CACHED = 4096
AUDIT_EVERY = 8  # matches, and blocks of the audited prompt: all are seen within 64 matches


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
        self.version = 0  # grows with whatever may change what a match finds
        self._live = 0
        self._walked = 0  # bits of holders whose blocks are looked at one by one
        self._matches = 0
        self._expected = ExpectedPrefixes()
        self._partings: dict[BlockHash, int] = {}  # a guess for each root; verified whenever it is used
        self._positions: dict[int, npt.NDArray[np.int64]] = {}  # slot numbers of a mask, for masks that come up often
        self._retired = 0  # bits that nobody has any more, waiting for the next round of sweeping
        self._sweeping = 0  # bits that the current round takes out
        self._cursor = 0
        self._round_end = 0

    # holders

    def add(self, holder: Holder, *, closed: bool = True) -> int:
        """The slot number of a holder, which is the position of its depth in a match. Idempotent."""
        slot = self._slots.get(holder)
        if slot is None:
            number = self._free_numbers.pop() if self._free_numbers else len(self._slots)
            slot = self._slots[holder] = _Slot(number, closed)
            self._assign_bit(slot)
        return slot.number

    def slot(self, holder: Holder) -> int:
        return self._slots[holder].number

    def discard(self, holder: Holder) -> None:
        """The holder is gone, and with it every claim (I8)."""
        slot = self._slots.pop(holder, None)
        if slot is not None:
            self._forget(slot)
            self._free_numbers.append(slot.number)

    def clear(self, holder: Holder) -> None:
        """The holder lives and has nothing left, expectations included."""
        slot = self._slots.get(holder)
        if slot is not None:
            self._forget(slot)
            self._assign_bit(slot)

    def doubt(self, holder: Holder) -> None:
        """Trust no closure of this holder until it is cleared or replaced: a report of it may be missing."""
        slot = self._slots.get(holder)
        if slot is not None:
            self._walked |= slot.mask
            self.version += 1

    def trust(self, holder: Holder) -> None:
        """Everything that this holder has is known again, and in order."""
        slot = self._slots[holder]
        if slot.closed:
            self._walked &= ~slot.mask
            self.version += 1

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
        slot.claims += self._blocks.add(blocks, bit, self._live)
        self.version += 1
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
        slot.claims -= self._blocks.discard(blocks, slot.mask)
        self.version += 1
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
            self.version += 1

    def unexpect(self, holder: Holder, blocks: Sequence[BlockHash]) -> None:
        """One of those who would have stored this chain does not."""
        slot = self._slots.get(holder)
        if slot is not None and blocks:
            self._expected.discard(slot.number, blocks[-1])
            self.version += 1

    def expire(self, now: float) -> None:
        self.version += self._expected.expire(now)

    # matching

    def match(self, block_hashes: Sequence[BlockHash]) -> PrefixMatch:
        """The longest match of a prompt on every slot, contiguous from its first block (I4)."""
        confirmed = self._depths(block_hashes)
        if not self._expected:
            return PrefixMatch(confirmed, confirmed)
        depths = confirmed.copy()
        for slots, depth in self._expected.depths(block_hashes):
            numbers = np.fromiter(slots, np.int64, len(slots))
            depths[numbers] = np.maximum(depths[numbers], depth)
        return PrefixMatch(depths, confirmed)

    def _depths(self, hashes: Sequence[BlockHash]) -> IntArray:
        depths = np.zeros(len(self._slots) + len(self._free_numbers), dtype=np.int32)
        if not hashes:
            return depths
        walked = self._live & self._walked
        losses = self._bisect(hashes, self._live ^ walked)
        self._matches += 1
        if self._matches % AUDIT_EVERY == 0:
            broken = self._audit(hashes, losses)
            if broken:
                self._walked |= broken
                self.version += 1
                return self._depths(hashes)
        self._write_out(depths, losses)
        if walked:
            self._write_out(depths, self._walk(hashes, 0, walked))
        return depths

    def _bisect(self, hashes: Sequence[BlockHash], asked: int) -> list[Loss]:
        """Where the slots of `asked`, all closed, drop out, in order of depth; those without the first block are left out."""
        shards, high_bits, low_bits = self._blocks.shards, self._blocks.high, self._blocks.low
        total, num_shards = len(hashes), len(shards)
        most = total // total.bit_length()  # losses up to which bisection is cheaper than a walk
        mask = self._blocks.get(hashes[0]) & asked
        low, high, kept = self._usual_first_loss(hashes, mask)
        losses: list[Loss] = []
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
            losses.append((low, mask ^ kept))
            if len(losses) > most:
                return losses + self._walk(hashes, low, kept)
            mask, high, kept, low = kept, total, 0, low + 1
        if losses:
            self._partings[hashes[0]] = losses[0][0]
        return losses

    def _walk(self, hashes: Sequence[BlockHash], start: int, mask: int) -> list[Loss]:
        """The same for slots that have all blocks before `start`, whether closed or not, by a look at every block."""
        get = self._blocks.get
        losses: list[Loss] = []
        for depth in range(start, len(hashes)):
            kept = get(hashes[depth]) & mask
            if kept != mask:
                losses.append((depth, mask ^ kept))
                mask = kept
                if not mask:
                    return losses
        losses.append((len(hashes), mask))
        return losses

    def _audit(self, hashes: Sequence[BlockHash], losses: Sequence[Loss]) -> int:
        """The slots that lack one of the blocks looked at, all of which they should have if they are closed."""
        position, broken = self._matches // AUDIT_EVERY % AUDIT_EVERY, 0
        mask = sum(lost for _, lost in losses)
        for depth, lost in losses:
            while position < depth:
                broken |= mask & ~self._blocks.get(hashes[position])
                position += AUDIT_EVERY
            mask ^= lost
        return broken

    def _usual_first_loss(self, hashes: Sequence[BlockHash], mask: int) -> tuple[int, int, int]:
        """Bounds of the first depth at which a slot of `mask` drops out, and what is left at the upper one.

        Prompts that share a root mostly part at the same depth, the end of a system prompt, so two look-ups there are worth
        more than a bisection of the whole.
        """
        total, get = len(hashes), self._blocks.get
        if not mask:
            return 0, 0, 0
        if len(self._partings) > CACHED:
            self._partings.clear()
        depth = self._partings.get(hashes[0], 0)
        if depth < 1 or depth >= total or get(hashes[depth - 1]) & mask != mask:
            return 1, total, 0
        here = get(hashes[depth]) & mask
        return (depth + 1, total, 0) if here == mask else (depth, depth, here)

    def _write_out(self, depths: IntArray, losses: Sequence[Loss]) -> None:
        """At each loss write the depth of all that still had blocks: the many that have the root are mostly the same."""
        held = sum(lost for _, lost in losses)
        for depth, lost in losses:
            self._write(depths, held, depth)
            held ^= lost

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

    # upkeep

    def sweep(self) -> None:
        """Take bits that nobody has any more out of the next piece of the map. Every change calls it.

        Pieces that split off during a round come from a piece as it is swept, so the round need not visit them.
        """
        if not self._sweeping:
            if not self._retired:
                return
            self._sweeping, self._retired = self._retired, 0
            self._cursor, self._round_end = 0, len(self._blocks.shards)
        self._blocks.sweep(self._cursor, self._live)
        self._cursor += 1
        if self._cursor == self._round_end:
            free = [bit for bit in range(len(self._numbers)) if self._sweeping >> bit & 1]
            self._free_bits = sorted([*self._free_bits, *free], reverse=True)
            self._sweeping = 0

    def check(self) -> None:
        """Raise `InvariantError` if the map contradicts its own counts. O(blocks)."""
        live = sum(slot.mask for slot in self._slots.values())
        if live != self._live or live.bit_count() != len(self._slots):
            raise InvariantError(f"I8: live bits {self._live:b} are not those of the holders, {live:b}")
        claims = dict.fromkeys(self._slots, 0)
        if live & (self._retired | self._sweeping) or self._walked & ~live:
            raise InvariantError(
                f"I8: bits {self._live:b} live, {self._walked:b} walked, {self._retired | self._sweeping:b} gone"
            )
        known = live | self._retired | self._sweeping
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
        self.version += 1
        slot.bit = self._free_bits.pop() if self._free_bits else len(self._numbers)
        if slot.bit == len(self._numbers):
            self._numbers.append(0)
        self._numbers[slot.bit] = slot.number
        self._positions.clear()
        slot.mask, slot.claims = 1 << slot.bit, 0
        self._live |= slot.mask
        if not slot.closed:
            self._walked |= slot.mask

    def _forget(self, slot: _Slot) -> None:
        self._expected.forget(slot.number)
        self._retire(slot)

    def _retire(self, slot: _Slot) -> None:
        """Let every confirmed claim vanish at once; the bit is swept out of the map and only then used again."""
        self.version += 1
        self._live ^= slot.mask
        self._walked &= ~slot.mask
        self._retired |= slot.mask
