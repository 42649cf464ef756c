"""Several processes that train one model: the first rank's commands, and loading without a rank that holds the whole model."""
