"""Stand-ins for the parts of the system that a test does not want to start."""
