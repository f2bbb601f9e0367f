"""The later stages of a pipeline as Ray actors, which belong to the process of the first one.

Hidden states travel from stage to stage through Ray's object store, by reference, and not by way of the first.
"""

from __future__ import annotations

import logging
from concurrent.futures import Future
from typing import Any

import ray
from torch import Tensor

from models.base import ForwardBatch
from workers.config import WorkerConfig
from workers.stage import BuildStage, PrefillStage

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 3.0


def start_stages(config: WorkerConfig, build: BuildStage) -> list[RayStage]:
    """Begin to start the later stages of a worker. Ray ends them with this process."""
    direct = ray.remote(enable_tensor_transport=True)  # type: ignore[call-overload]  # its annotations lack it
    stage = direct(PrefillStage) if "rdt_" in config.transport else ray.remote(PrefillStage)
    return [
        RayStage(stage.options(**options).remote(config, number, build))
        for number, options in zip(range(1, config.stages), config.stage_options, strict=True)
    ]


class RayStage:
    def __init__(self, handle: Any) -> None:
        self._handle = handle

    def forward(self, number: int, batch: ForwardBatch, hidden: Any) -> tuple[Future[Tensor | None], Any]:
        logits, passed_on = self._handle.forward.options(num_returns=2).remote(number, batch, hidden)
        return logits.future(), passed_on

    def call(self, method: str, *args: Any) -> Future[Any]:
        answer: Future[Any] = getattr(self._handle, method).remote(*args).future()
        return answer

    def end(self) -> None:
        try:
            self.call("close").result(CLOSE_TIMEOUT_S)
        except Exception as error:
            logger.info("a stage did not close by itself: %s", type(error).__name__)
        ray.kill(self._handle)
