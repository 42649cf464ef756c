"""Trackers of a run's metrics, next to the console and ``metrics.jsonl``, which every run has."""
