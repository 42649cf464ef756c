"""Files, locks, paths and signals: helpers that know nothing of training."""
