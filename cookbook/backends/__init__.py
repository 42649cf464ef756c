"""Backends, which train a model: ``local`` computes in this process, ``remote`` is a client of a server."""
