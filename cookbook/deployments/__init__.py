"""Where samples come from: ``embedded`` where the trainer is, in this process or on its server."""
