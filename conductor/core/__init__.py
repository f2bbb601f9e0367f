"""The decision core: events and the time in, commands out. No clock, no I/O, no randomness of its own."""
