"""Belief about workers as columns: one numpy array a property, one row a worker, rows in order of worker id.

A decision reads every candidate at once, so its cost hardly grows with the number of workers, and `argmin` breaks ties by
worker id for free. Rows come and go rarely; then every column is copied.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from typing import Any, ClassVar, TypeAlias

import numpy as np
import numpy.typing as npt

from conductor.core.types import InvariantError, WorkerId, WorkerSpec

FloatArray: TypeAlias = npt.NDArray[np.float64]
IntArray: TypeAlias = npt.NDArray[np.int64]
BoolArray: TypeAlias = npt.NDArray[np.bool_]


class WorkerTable:
    """`ids` is replaced, never changed, when rows come or go: whoever keeps a reference keeps the names of its rows."""

    COLUMNS: ClassVar[Mapping[str, type]] = {}

    def __init__(self) -> None:
        self.ids: tuple[WorkerId, ...] = ()
        self.row: dict[WorkerId, int] = {}
        self.specs: dict[WorkerId, WorkerSpec] = {}
        for name, kind in self.COLUMNS.items():
            setattr(self, name, np.zeros(0, dtype=kind))

    def __len__(self) -> int:
        return len(self.ids)

    def __contains__(self, worker: object) -> bool:
        return worker in self.row

    def _insert(self, spec: WorkerSpec, values: Mapping[str, Any]) -> None:
        at = bisect_left(self.ids, spec.id)
        for name in self.COLUMNS:
            setattr(self, name, np.insert(getattr(self, name), at, values.get(name, 0)))
        self.specs[spec.id] = spec
        self._renumber((*self.ids[:at], spec.id, *self.ids[at:]))

    def _delete(self, worker: WorkerId) -> None:
        at = self.row[worker]
        for name in self.COLUMNS:
            setattr(self, name, np.delete(getattr(self, name), at))
        del self.specs[worker]
        self._renumber(self.ids[:at] + self.ids[at + 1 :])

    def _renumber(self, ids: tuple[WorkerId, ...]) -> None:
        self.ids = ids
        self.row = {worker: row for row, worker in enumerate(ids)}

    def check(self) -> None:
        if list(self.ids) != sorted(self.specs) or len(self.row) != len(self.ids):
            raise InvariantError(f"worker rows {self.ids} do not match the known workers {sorted(self.specs)}")
        for name in self.COLUMNS:
            if len(getattr(self, name)) != len(self.ids):
                raise InvariantError(f"column {name} has {len(getattr(self, name))} rows for {len(self.ids)} workers")
