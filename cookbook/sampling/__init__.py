"""Completions of the policy: rollouts and their rewards, evaluation, retries, reference logprobs."""
