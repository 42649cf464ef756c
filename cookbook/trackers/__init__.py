"""Where metrics go: the console and ``metrics.jsonl`` always, other places when asked."""
