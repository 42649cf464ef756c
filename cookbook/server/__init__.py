"""Training and sampling over HTTP: serves the embedded trainer with the protocol of the Tinker client."""
