"""Pinned blocks of a store directory, kept as empty files, so that every process that uses it sees them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from conductor.core.types import BlockHash
from workers.kv_store.files import Files

PIN_DIRECTORY = "pins"


class Pins:
    def __init__(self, root: Path, files: Files) -> None:
        self._directory, self._files = root / PIN_DIRECTORY, files
        self._names: frozenset[BlockHash] = frozenset()
        self.refresh()

    def __contains__(self, name: BlockHash) -> bool:
        return name in self._names

    def __len__(self) -> int:
        return len(self._names)

    def __iter__(self) -> Iterator[BlockHash]:
        return iter(self._names)

    def refresh(self) -> None:
        """Take up what others have pinned and unpinned."""
        self._names = frozenset(int(name, 16) for name in self._files.list_dir(self._directory) if _is_hash(name))

    def add(self, names: Iterable[BlockHash]) -> None:
        self._files.make_dir(self._directory)
        for name in names:
            self._files.append(self._directory / f"{name:032x}", [])
        self.refresh()

    def discard(self, names: Iterable[BlockHash]) -> None:
        for name in names:
            self._files.unlink(self._directory / f"{name:032x}")
        self.refresh()


def _is_hash(name: str) -> bool:
    return len(name) == 32 and set(name) <= set("0123456789abcdef")
