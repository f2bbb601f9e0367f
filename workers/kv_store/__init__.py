"""The only place where KV bytes live off the device: one contract (`base.py`), one file a tier, retention as a pure plan."""
