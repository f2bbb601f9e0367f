"""Small models with random weights, as Hugging Face folders, and short ways to run a model over a paged cache."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from models.base import CausalLM, ForwardBatch, PagedKVCache
from models.projected_config import PROJECTED_ARCHITECTURE, projected_from_hf, projected_shapes

TINY: dict[str, Any] = {
    "vocab_size": 288,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "eos_token_id": 0,
    "bos_token_id": 1,
}
TINY_PROJECTED: dict[str, Any] = {
    **{name: value for name, value in TINY.items() if name != "num_hidden_layers"},
    "architectures": [PROJECTED_ARCHITECTURE],
    "num_encoder_layers": 2,
    "num_decoder_layers": 3,
    "head_dim": 16,
    "sliding_window": 20,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN_ROPE = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}


def write_tiny_folder(folder: Path, kind: str, *, shard_size: str = "1GB", **changes: Any) -> Any:
    """Save a random model of `kind` (llama, qwen2, ...) and return it as transformers computes it."""
    torch.manual_seed(7)
    reference = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**TINY, **changes}), attn_implementation="eager")
    reference = reference.float().eval()
    for name, parameter in reference.named_parameters():
        if name.endswith(("bias", "norm.weight")):
            torch.nn.init.normal_(parameter, mean=0.5, std=0.3)
    reference.save_pretrained(folder, max_shard_size=shard_size)
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    return reference


def write_projected_folder(folder: Path, **changes: Any) -> dict[str, Tensor]:
    """Save a random model that reads an encoder's output, and return its tensors."""
    values = {**TINY_PROJECTED, **changes}
    generator = torch.Generator().manual_seed(7)
    tensors = {}
    for name, shape in projected_shapes(projected_from_hf(values, "config.json")).items():
        mean, spread = (0.5, 0.3) if len(shape) == 1 else (0.0, values["initializer_range"])
        tensors[name] = torch.randn(shape, generator=generator) * spread + mean
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(values))
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    return tensors


def byte_tokenizer() -> Tokenizer:
    """A tokenizer with one token a byte, and no merges."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={symbol: i + 2 for i, symbol in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def new_cache(model: CausalLM, blocks: int = 24, block_tokens: int = 16) -> PagedKVCache:
    return PagedKVCache(model.layout, blocks, block_tokens)


def run(model: CausalLM, cache: PagedKVCache, tokens: Sequence[int], table: Sequence[int], context: int = 0) -> Tensor:
    """Logits [vocab] of the last of `tokens`, computed on top of `context` cached ones."""
    return model.forward(ForwardBatch(torch.tensor(tokens), [len(tokens)], [context], [table]), cache)[0]


def greedy(model: CausalLM, prompt: Sequence[int], steps: int, table: Sequence[int], cache: PagedKVCache) -> list[int]:
    """`steps` tokens, each the most likely one."""
    context, tokens, output = 0, list(prompt), []
    for _ in range(steps):
        logits = run(model, cache, tokens, table, context)
        context += len(tokens)
        tokens = [int(logits.argmax())]
        output += tokens
    return output


def greedy_batch(model: CausalLM, prompts: Sequence[Sequence[int]], steps: int) -> list[list[int]]:
    """The same for several prompts, prefilled one by one and decoded together."""
    blocks = [-(-(len(prompt) + steps) // 16) for prompt in prompts]
    tables = [list(range(sum(blocks[:i]), sum(blocks[: i + 1]))) for i in range(len(prompts))]
    cache = new_cache(model, sum(blocks))
    outputs = [[int(run(model, cache, prompt, table).argmax())] for prompt, table in zip(prompts, tables, strict=True)]
    for step in range(steps - 1):
        last = torch.tensor([output[-1] for output in outputs])
        batch = ForwardBatch(last, [1] * len(prompts), [len(prompt) + step for prompt in prompts], tables)
        for output, token in zip(outputs, model.forward(batch, cache).argmax(dim=-1).tolist(), strict=True):
            output.append(token)
    return outputs
