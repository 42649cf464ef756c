"""Sampling: batched autoregressive decoding."""
