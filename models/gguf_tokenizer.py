"""The tokenizer inside GGUF metadata, written as the files that a Hugging Face folder has.

Byte-level byte-pair encoding only; how text is split before merging is not in the metadata but named there
(`tokenizer.ggml.pre`), so that only known names are accepted. Generation stops at the end-of-sequence token and at every
control token whose name says that a text or a turn ends. Torch-free.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from models.cache import write_json
from models.errors import ModelFileError

_CONTROL = 3
_USER_DEFINED = 4
_END_TOKENS = ("<|endoftext|>", "<|im_end|>", "<|eot_id|>", "<|end_of_text|>")


def _gpt2_split() -> Any:
    return pre_tokenizers.ByteLevel(add_prefix_space=False)


def _smollm_split() -> Any:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2_split()])


_PRE_TOKENIZERS: dict[str, Callable[[], Any]] = {"gpt-2": _gpt2_split, "smollm": _smollm_split}


def write_tokenizer(metadata: Mapping[str, Any], source: str, folder: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and generation_config.json into `folder`."""
    build_tokenizer(metadata, source).save(str(folder / "tokenizer.json"))
    tokens = metadata["tokenizer.ggml.tokens"]
    config = {
        "add_bos_token": bool(metadata.get("tokenizer.ggml.add_bos_token", False)),
        "chat_template": metadata.get("tokenizer.chat_template"),
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    for role in ("bos", "eos", "unknown", "padding"):
        token_id = metadata.get(f"tokenizer.ggml.{role}_token_id")
        if token_id is not None:
            config[f"{ {'unknown': 'unk', 'padding': 'pad'}.get(role, role) }_token"] = tokens[token_id]
    write_json(folder / "tokenizer_config.json", config)
    write_json(folder / "generation_config.json", {"eos_token_id": _end_ids(metadata)})


def _end_ids(metadata: Mapping[str, Any]) -> list[int]:
    tokens, kinds = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    named = [i for i, token in enumerate(tokens) if kinds[i] == _CONTROL and token in _END_TOKENS]
    eos = metadata.get("tokenizer.ggml.eos_token_id")
    return list(dict.fromkeys([*([] if eos is None else [eos]), *named]))


def build_tokenizer(metadata: Mapping[str, Any], source: str) -> Tokenizer:
    """The tokenizer that the metadata describes. Raises `ModelFileError` for other kinds than byte-level BPE."""
    kind, split = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre", "gpt-2")
    if kind != "gpt2":
        raise ModelFileError(f"{source}: tokenizer.ggml.model is {kind!r}; allowed: gpt2 (byte-level BPE)")
    if split not in _PRE_TOKENIZERS:
        raise ModelFileError(f"{source}: tokenizer.ggml.pre is {split!r}; allowed: {', '.join(_PRE_TOKENIZERS)}")
    tokens, kinds = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = _PRE_TOKENIZERS[split]()
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([_added(token, True) for i, token in enumerate(tokens) if kinds[i] == _CONTROL])
    tokenizer.add_tokens([_added(token, False) for i, token in enumerate(tokens) if kinds[i] == _USER_DEFINED])
    return tokenizer


def _added(token: str, special: bool) -> AddedToken:
    return AddedToken(token, special=special, normalized=False)
