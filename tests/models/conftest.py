"""The default model (pulled if it is not cached) and its twin in transformers, loaded once a session."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from models.export_hf import export_model
from models.load import LoadedModel, load_model
from models.pull import DEFAULT_MODEL


@pytest.fixture(scope="session")
def default_model() -> LoadedModel:
    torch.set_num_threads(1)
    return load_model(DEFAULT_MODEL)


@pytest.fixture(scope="session")
def reference_model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("exported")
    export_model(DEFAULT_MODEL, folder)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
