"""Conductor: a cache- and load-aware global scheduler for disaggregated LLM serving on Ray."""

__version__ = "0.1.0"
