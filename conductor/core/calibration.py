"""How far the cost models may be trusted, from what was predicted and what really happened.

Each worker has a multiplicative correction, a bounded exponentially weighted mean of actual over predicted time, so that
drift and a wrong profile are followed. Estimates count as calibrated only while recent observations agree with them: a
model that is ten times wrong, or has never been held against reality, or has not been for long, rejects nothing (I12).
Workers of one profile share their evidence; a worker that has just joined starts with its group's correction. Warm-up
samples are left out.

A decode step is never observed by itself: what is known of it is how long a request took from its first token on the decode
worker to its last. That time a token is held against the mean of the steps predicted for both ends.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from conductor.core.config import CalibrationConfig
from conductor.core.cost_profile import CostProfile
from conductor.core.decode_pool import DecodePool
from conductor.core.prefill_pool import PrefillPool
from conductor.core.types import WorkerId


@dataclass(slots=True)
class Evidence:
    """Running means over observations; early ones weigh more, until `learning_rate` is reached."""

    observations: int = 0
    correction: float = 1.0
    log_error: float = 0.0

    def weigh(self, ratio: float, log_error: float, config: CalibrationConfig) -> None:
        self.observations += 1
        rate = max(config.learning_rate, 1.0 / self.observations)
        bounded = min(max(ratio, 1.0 / config.max_correction), config.max_correction)
        self.correction += rate * (bounded - self.correction)
        self.log_error += rate * (log_error - self.log_error)


class Calibration:
    def __init__(self, config: CalibrationConfig) -> None:
        self._config = config
        self._workers: dict[WorkerId, Evidence] = {}
        self._groups: dict[CostProfile, Evidence] = {}
        self._group_numbers: dict[CostProfile, int] = {}

    def joined(self, worker: WorkerId, pool: PrefillPool) -> None:
        profile = pool.specs[worker].profile
        group = self._groups.setdefault(profile, Evidence())
        self._workers[worker] = Evidence(correction=group.correction)
        pool.correction[pool.row[worker]] = group.correction
        pool.profile_group[pool.row[worker]] = self._group_numbers.setdefault(profile, len(self._group_numbers))

    def left(self, worker: WorkerId) -> None:
        self._workers.pop(worker, None)

    def observe(self, worker: WorkerId, base_s: float, actual_s: float, pool: PrefillPool, now: float) -> None:
        """Learn from one prefill: `base_s` is the profile's uncorrected time for what was really computed."""
        if base_s <= 0.0 or actual_s <= 0.0:
            return
        profile = pool.specs[worker].profile
        own, group, ratio = self._workers[worker], self._groups[profile], actual_s / base_s
        log_error = abs(math.log(ratio / own.correction))
        own.weigh(ratio, log_error, self._config)
        group.weigh(ratio, log_error, self._config)
        pool.recalibrate(worker, own.correction, own.log_error)
        self._confirm(profile, group, pool, now)

    def _confirm(self, profile: CostProfile, group: Evidence, pool: PrefillPool, now: float) -> None:
        """Extend, or end, the time for which the group's estimates count as calibrated."""
        supported = (
            profile.calibrated
            and group.observations >= self._config.min_observations
            and group.log_error <= self._config.max_log_error
        )
        members = pool.profile_group == self._group_numbers[profile]
        agree = pool.log_error <= self._config.max_log_error if supported else np.zeros_like(members)
        pool.calibrated_until_s[members] = np.where(agree[members], now + self._config.ttl_s, -math.inf)


MIN_STEPS = 4  # a shorter decode says more about when it joined the batch than about the length of a step


class DecodeCalibration:
    """Keeps the decode pool's correction, interval and calibration, one piece of evidence a worker."""

    def __init__(self, config: CalibrationConfig) -> None:
        self._config = config
        self._workers: dict[WorkerId, Evidence] = {}

    def left(self, worker: WorkerId) -> None:
        self._workers.pop(worker, None)

    def observe(self, worker: WorkerId, base_s: float, steps: int, actual_s: float, pool: DecodePool, now: float) -> None:
        """Learn from one decode of `steps` steps in `actual_s`, for which the profile says `base_s` a step."""
        if steps < MIN_STEPS or base_s <= 0.0 or actual_s <= 0.0:
            return
        evidence = self._workers.setdefault(worker, Evidence())
        ratio = actual_s / steps / base_s
        evidence.weigh(ratio, abs(math.log(ratio / evidence.correction)), self._config)
        pool.recalibrate(worker, evidence.correction, evidence.log_error)
        supported = (
            pool.specs[worker].profile.calibrated
            and evidence.observations >= self._config.min_observations
            and evidence.log_error <= self._config.max_log_error
        )
        pool.calibrated_until_s[pool.row[worker]] = now + self._config.ttl_s if supported else -math.inf
