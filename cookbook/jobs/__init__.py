"""Trainer jobs: `cookbook serve` processes that a launcher starts, and that are found again, watched and restarted."""
