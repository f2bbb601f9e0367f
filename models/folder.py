"""From the name or path of a model to the folder that holds it, ready to read, and to its card.

Three things are accepted: the default model's name (pulled if need be), a GGUF file (turned into a prepared folder in the
cache), and a Hugging Face folder (used where it lies). The revision is a sha256 over what determines the weights. Torch-free:
gateway and command line learn a model's name, sizes and KV namespace here without loading it.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open

from models.cache import cache_root, ensure_folder, read_json, sha256_of, write_json
from models.errors import ModelFileError
from models.families import DecoderConfig, config_of_folder
from models.gguf import PREPARED_VERSION, prepare_gguf
from models.kv_layout import keeps_bits, number_format
from models.pull import DEFAULT_MODEL, SHA256, pull_default_model
from models.tokenizer import TextTokenizer, load_tokenizer_folder

KV_DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}  # of the paged cache, and their number formats


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """A model that is there to be read. `fused`: weights as one fused file, else as Hugging Face shards."""

    name: str
    path: Path
    revision: str
    config: DecoderConfig
    fused: bool


@dataclass(frozen=True, slots=True)
class ModelCard:
    """What one may know of a model without loading it. `namespace` holds everything that its KV depends on, but for the way
    it moves: see `namespace_in_formats`."""

    name: str
    revision: str
    max_context: int
    vocab_size: int
    kv_bytes_per_token: int
    namespace: tuple[str, ...]


def find_model(name_or_path: str) -> ModelFolder:
    """The folder of a model; pulls and prepares as needed. Raises `ModelFileError` or `ModelPullError`."""
    path = Path(name_or_path).expanduser()
    if name_or_path == DEFAULT_MODEL:
        return _prepared(DEFAULT_MODEL, SHA256, None)
    if path.suffix == ".gguf":
        return _prepared(path.stem.lower(), _known_sha256(path), path)
    if path.is_dir():
        return ModelFolder(path.resolve().name, path, _folder_revision(path), _folder_config(path), fused=False)
    raise ModelFileError(f"model {name_or_path!r} is unknown; allowed: {DEFAULT_MODEL}, a .gguf file, a Hugging Face folder")


def check_weights(folder: ModelFolder) -> None:
    """Whether the files of weights are whole, by what their heads say of them. Raises `ModelFileError`."""
    for weights in sorted(folder.path.glob("*.safetensors")):
        try:
            with safe_open(weights, framework="np"):
                pass
        except (SafetensorError, OSError) as error:
            raise ModelFileError(f"{weights} is damaged: {error}") from error


def load_tokenizer(name_or_path: str) -> TextTokenizer:
    return load_tokenizer_folder(find_model(name_or_path).path)


def load_card(name_or_path: str, kv_dtype: str = "float32", weight_format: str = "full") -> ModelCard:
    folder = find_model(name_or_path)
    return model_card(folder, load_tokenizer_folder(folder.path), kv_dtype, weight_format)


def model_card(folder: ModelFolder, tokenizer: TextTokenizer, kv_dtype: str, weight_format: str = "full") -> ModelCard:
    if kv_dtype not in KV_DTYPES:
        raise ModelFileError(f"kv_dtype is {kv_dtype!r}; allowed: {', '.join(KV_DTYPES)}")
    config = folder.config
    kept_as = number_format(KV_DTYPES[kv_dtype])
    states = config.kv_states(kept_as)
    return ModelCard(
        name=folder.name,
        revision=folder.revision,
        max_context=config.max_context,
        vocab_size=config.vocab_size,
        kv_bytes_per_token=int(sum(state.bytes_per_token for state in states)),
        namespace=(
            folder.name,
            folder.revision,
            tokenizer.fingerprint,
            kv_dtype,
            f"{config.layout_name}-{config.layout_version}",
            *(() if weight_format == "full" else (f"weights-{weight_format}",)),
        ),
    )


def namespace_in_formats(
    namespace: tuple[str, ...], kv_dtype: str, *, moved: str | None, stored: str | None, replayed: int = 0
) -> tuple[str, ...]:
    """The namespace of KV that moves between workers, and is kept below their caches, in these number formats (None: as it is
    cached), and whose window state may have been rebuilt by replaying so many windows (0: by as many as make it exact).

    What a lossy format brought, or followed from a short replay, is not what was computed, and nobody can tell which of a
    cache's blocks came so. So where KV goes through one, all of it lies in a namespace of its own, which no exact block shares.
    """
    formats = ((how, number_format(codec)) for how, codec in (("moved", moved), ("stored", stored)) if codec is not None)
    lossy = [f"{how}-as-{one.name}" for how, one in formats if not keeps_bits(one.name, number_format(KV_DTYPES[kv_dtype]))]
    replays = [f"windows-replayed-{replayed}"] if replayed else []
    return (*namespace, *lossy, *replays)


def _prepared(name: str, sha256: str, source: Path | None) -> ModelFolder:
    """The prepared folder of a GGUF file; `source` None is the default model, pulled only if its folder must be built."""

    def build(folder: Path) -> None:
        prepare_gguf(pull_default_model() if source is None else source, folder)

    target = cache_root() / "models" / f"{name}-{sha256[:16]}-v{PREPARED_VERSION}"
    path = ensure_folder(target, sha256, build)
    return ModelFolder(name, path, sha256, _folder_config(path), fused=True)


def _folder_config(path: Path) -> DecoderConfig:
    return config_of_folder(read_json(path / "config.json"), str(path / "config.json"))


def _folder_revision(path: Path) -> str:
    digest = hashlib.sha256((path / "config.json").read_bytes() if (path / "config.json").is_file() else b"")
    for weights in sorted(path.glob("*.safetensors")):
        digest.update(f"{weights.name}:{_known_sha256(weights)};".encode())
    return digest.hexdigest()


def _known_sha256(path: Path) -> str:
    """sha256 of a large file, remembered in the cache as long as size and modification time stay the same."""
    if not path.is_file():
        raise ModelFileError(f"{path} is missing")
    stat = path.stat()
    identity = {"bytes": stat.st_size, "modified_ns": stat.st_mtime_ns}
    key = hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:32]
    note = cache_root() / "digests" / f"{key}.json"
    if note.is_file():
        known = read_json(note)
        if all(known.get(name) == value for name, value in identity.items()):
            return str(known["sha256"])
    digest = sha256_of(path)
    write_json(note, {**identity, "sha256": digest})
    return digest
