"""HTTP routes: each reads a request and writes a response; the handlers do the work."""
