"""Readers and writers of public trace formats: Mooncake, Azure LLM, BurstGPT, Qwen-Bailian; plain, gzip or zstd."""

from traces.formats.reader import FORMATS, Trace, open_trace

__all__ = ["FORMATS", "Trace", "open_trace"]
