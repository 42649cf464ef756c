"""Where samples come from: ``embedded`` in the trainer's process."""
