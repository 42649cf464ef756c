"""The engine: the only package that runs a model. Synchronous; without threads, HTTP or config files; names no loss."""
