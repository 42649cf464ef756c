"""The output head: log-probabilities of target tokens from hidden states."""
