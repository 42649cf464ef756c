"""Files, locks, paths and signals: helpers that do not depend on training."""
