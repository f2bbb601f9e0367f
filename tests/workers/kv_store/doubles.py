"""A tiny format, blocks whose bytes follow from their hash, and file operations that fail or crash when they are told to."""

from __future__ import annotations

import errno
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from conductor.core.types import BlockHash
from workers.kv_store.base import BlockFormat, NewBlock
from workers.kv_store.files import Files
from workers.kv_transfer.base import KVArray, KVDescriptor

KV = KVDescriptor("gqa", 1, "float32", (2, 1, 2), num_layers=2, block_tokens=4, layer_block_bytes=64)
FORMAT = BlockFormat("model-a", KV)
BLOCK_BYTES = FORMAT.block_bytes


def name_of(branch: int, depth: int) -> BlockHash:
    """Branches share their first two blocks. Spread over the 128 bits, as real hashes are."""
    number = depth if depth < 2 else 1000 * (branch + 1) + depth
    return (number + 1) * 0x9E3779B97F4A7C15F39CC0605CEDC835 % 2**128


def chain(branch: int, blocks: int) -> tuple[BlockHash, ...]:
    return tuple(name_of(branch, depth) for depth in range(blocks))


def content(name: BlockHash) -> KVArray:
    """What the block `name` holds."""
    return np.random.default_rng(name % 2**64).integers(0, 256, BLOCK_BYTES, dtype=np.uint8)


def new_blocks(names: Sequence[BlockHash], traffic_class: str = "chat") -> list[NewBlock]:
    """A whole prefix, from its root on."""
    return [NewBlock(name, names[at - 1] if at else None, content(name), traffic_class) for at, name in enumerate(names)]


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


class CrashedError(BaseException):
    """The process is gone in the middle of an operation. No `except Exception` may hold it up."""


@dataclass
class FaultyFiles(Files):
    """Real files. After `crash_after` more changing steps the process is gone; what was not synced may be lost in part.

    `fail` maps a path to an errno for steps that change or read it.
    """

    seed: int = 0
    crash_after: int | None = None
    write_error: int | None = None
    read_error: int | None = None
    steps: int = 0
    unsynced: dict[Path, int] = field(default_factory=dict)

    def _step(self) -> bool:
        """Whether the process ends within this step."""
        self.steps += 1
        if self.write_error is not None:
            raise OSError(self.write_error, errno.errorcode[self.write_error])
        if self.crash_after is None:
            return False
        self.crash_after -= 1
        return self.crash_after < 0

    def append(self, path: Path, buffers: Sequence[bytes | KVArray]) -> None:
        dies = self._step()
        synced = self.unsynced.get(path, self.size(path) or 0)
        self.unsynced[path] = synced
        super().append(path, buffers)
        if dies:
            self._die()

    def sync(self, path: Path) -> None:
        if self._step():
            self._die()
        super().sync(path)
        self.unsynced.pop(path, None)

    def publish(self, temporary: Path, path: Path) -> None:
        if self._step():
            self._die()
        super().publish(temporary, path)
        self.unsynced.pop(temporary, None)

    def unlink(self, path: Path) -> None:
        if self._step():
            self._die()
        super().unlink(path)
        self.unsynced.pop(path, None)

    def read(self, path: Path, offset: int, count: int) -> KVArray:
        if self.read_error is not None:
            raise OSError(self.read_error, errno.errorcode[self.read_error])
        return super().read(path, offset, count)

    def map(self, path: Path, count: int) -> KVArray:
        if self.read_error is not None:
            raise OSError(self.read_error, errno.errorcode[self.read_error])
        return super().map(path, count)

    def _die(self) -> None:
        """A power cut: of what was not synced any part may have reached the disk."""
        dice = random.Random(self.seed)
        for path, synced in self.unsynced.items():
            size = self.size(path)
            if size is not None:
                with path.open("r+b") as file:
                    file.truncate(dice.randint(min(synced, size), size))
        raise CrashedError


def damage(path: Path, change: Callable[[bytearray], None]) -> None:
    """Change a file's bytes in place."""
    data = bytearray(path.read_bytes())
    change(data)
    path.write_bytes(bytes(data))
