"""The trainer as a service: the embedded trainer behind HTTP, in the protocol that Tinker's client speaks."""
