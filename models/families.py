"""Which architecture is read by which configuration. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

from models.config import HF_ARCHITECTURES, ModelConfig, config_from_hf
from models.deepseek_config import DEEPSEEK_ARCHITECTURES, DeepseekConfig, deepseek_from_hf
from models.errors import ModelFileError
from models.gemma_config import GEMMA_ARCHITECTURES, gemma_from_hf
from models.latent_config import LATENT_ARCHITECTURE, latent_from_hf
from models.projected_config import PROJECTED_ARCHITECTURE, ProjectedConfig, projected_from_hf

DecoderConfig: TypeAlias = ModelConfig | DeepseekConfig | ProjectedConfig


def config_of_folder(values: Mapping[str, Any], source: str) -> DecoderConfig:
    """The configuration in a `config.json`. Raises `ModelFileError` for an architecture, or a field, that is not supported."""
    found = values.get("architectures")
    name = found[0] if isinstance(found, list) and found else None
    if name in HF_ARCHITECTURES:
        return config_from_hf(values, source)
    if name in DEEPSEEK_ARCHITECTURES:
        return deepseek_from_hf(values, source)
    if name == LATENT_ARCHITECTURE:
        return latent_from_hf(values, source)
    if name in GEMMA_ARCHITECTURES:
        return gemma_from_hf(values, source)
    if name == PROJECTED_ARCHITECTURE:
        return projected_from_hf(values, source)
    ours = (LATENT_ARCHITECTURE, PROJECTED_ARCHITECTURE)
    allowed = ", ".join((*HF_ARCHITECTURES, *GEMMA_ARCHITECTURES, *DEEPSEEK_ARCHITECTURES, *ours))
    raise ModelFileError(f"{source}: architectures {'is missing' if found is None else f'is {found!r}'}; allowed: {allowed}")
