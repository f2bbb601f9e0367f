"""How a model's layers are shared out over the stages of a pipeline. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass

from models.config import ModelConfig
from models.errors import ModelFileError
from models.families import DecoderConfig


@dataclass(frozen=True, slots=True)
class Share:
    """The `number`-th of `of` even shares of a model's layers, all of them by default."""

    number: int = 0
    of: int = 1

    def check(self, config: DecoderConfig, setting: str = "stages") -> None:
        """Raises `ModelFileError` when a model's layers cannot be shared out so. `setting`: what people call the number."""
        if not isinstance(config, ModelConfig) and self.of > 1:
            raise ModelFileError(f"{setting} is {self.of}; allowed: 1 for a model with latent attention, experts or an encoder")
        if self.of > config.num_layers:
            raise ModelFileError(f"{setting} is {self.of}; allowed: 1 to {config.num_layers}, the number of the model's layers")

    def layers(self, num_layers: int) -> range:
        return range(num_layers * self.number // self.of, num_layers * (self.number + 1) // self.of)


WHOLE = Share()
