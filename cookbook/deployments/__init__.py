"""Deployments, which sample the rollouts: ``embedded`` is the trainer itself, ``vllm`` runs servers in other processes."""
