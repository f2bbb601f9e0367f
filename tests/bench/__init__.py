"""Benchmarks: figures for people, ratios for judgement. `python -m tests.bench --help` lists them."""
