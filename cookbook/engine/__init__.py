"""The single place where a model computes: synchronous, no threads, no HTTP, no config files, and no loss known by name."""
