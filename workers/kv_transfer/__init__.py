"""The only place where KV bytes move between workers: one contract (`base.py`), one file a transport, chosen by name."""
