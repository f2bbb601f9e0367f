"""Traces: readers, generators, the virtual-time simulator, replay and reports."""
