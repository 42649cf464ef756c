"""State of the server in memory: requests, runs, samplers, sessions, checkpoints."""
