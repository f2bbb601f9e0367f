"""Workers: Ray actors that run prefill and decode on real kernels and move KV cache between each other."""
