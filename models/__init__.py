"""Models: torch kernels over paged KV cache, weights, tokenizers and sampling. Imports nothing of ours."""
