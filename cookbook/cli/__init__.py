"""The door: what is typed at a shell, and nothing that trains."""
