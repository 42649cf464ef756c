"""Where samples come from: ``embedded`` where the trainer is, ``vllm`` from servers of their own."""
