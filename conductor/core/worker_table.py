"""Belief about workers as columns: one numpy array a property, one row a worker, rows in order of worker id.

A decision reads every candidate at once, so its cost hardly grows with the number of workers, and `argmin` breaks ties by
worker id for free. Rows come and go rarely; then every column is copied. On a few dozen rows an array operation costs the same
half microsecond whatever it does, so what many decisions share is kept until something that it was made from changes.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping
from typing import Any, ClassVar, TypeAlias

import numpy as np
import numpy.typing as npt

from conductor.core.types import InvariantError, WorkerId, WorkerSpec

MAX_MODELS = 64  # whose workers are kept at hand

FloatArray: TypeAlias = npt.NDArray[np.float64]
IntArray: TypeAlias = npt.NDArray[np.int64]
BoolArray: TypeAlias = npt.NDArray[np.bool_]


def some(rows: BoolArray) -> bool:
    """Whether any row is true: `any` of a short array takes ten times as long."""
    return len(rows) > 0 and bool(rows[rows.argmax()])


def lowest_of(values: FloatArray) -> float:
    """The minimum of a column that is not empty, as quickly."""
    return float(values[values.argmin()])


def mean_of(values: FloatArray) -> float:
    """The mean of a column that is not empty, as quickly."""
    return float(np.add.reduce(values)) / len(values)


class WorkerTable:
    """`ids` is replaced, never changed, when rows come or go: whoever keeps a reference keeps the names of its rows.

    `version` grows with whatever changes how fast, how far trusted or how reachable a worker is; load does not count.
    """

    COLUMNS: ClassVar[Mapping[str, type]] = {}
    capacity_blocks: FloatArray
    accepts: BoolArray

    def __init__(self) -> None:
        self.version = 0
        self.ids: tuple[WorkerId, ...] = ()
        self.row: dict[WorkerId, int] = {}
        self.specs: dict[WorkerId, WorkerSpec] = {}
        self._serving: dict[str, BoolArray] = {}
        self.least_capacity_blocks = 0.0
        for name, kind in self.COLUMNS.items():
            setattr(self, name, np.zeros(0, dtype=kind))

    def __len__(self) -> int:
        return len(self.ids)

    def __contains__(self, worker: object) -> bool:
        return worker in self.row

    def serving(self, model: str) -> BoolArray:
        """Which workers serve a model. The array is not to be written to."""
        rows = self._serving.get(model)
        if rows is None:
            if len(self._serving) >= MAX_MODELS:
                self._serving.clear()
            served = [self.specs[worker].model in ("", model) for worker in self.ids]
            rows = self._serving[model] = np.array(served, dtype=np.bool_)
        return rows

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
        self.version += 1
        self._serving.clear()
        self.least_capacity_blocks = float(self.capacity_blocks.min(initial=math.inf))
        self.ids = ids
        self.row = {worker: row for row, worker in enumerate(ids)}

    def check(self) -> None:
        if list(self.ids) != sorted(self.specs) or len(self.row) != len(self.ids):
            raise InvariantError(f"worker rows {self.ids} do not match the known workers {sorted(self.specs)}")
        for name in self.COLUMNS:
            if len(getattr(self, name)) != len(self.ids):
                raise InvariantError(f"column {name} has {len(getattr(self, name))} rows for {len(self.ids)} workers")
