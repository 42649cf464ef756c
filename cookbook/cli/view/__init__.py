"""``cookbook view``: the metrics and rollouts of runs as a web page."""
