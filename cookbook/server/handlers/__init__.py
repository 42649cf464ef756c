"""Handlers: one module per kind of request, and the recovery of all requests after a restart."""
