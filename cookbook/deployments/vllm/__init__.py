"""Deployment ``vllm``: sampling from vLLM servers, whose weights are replaced while they run.

vLLM's processes import this package for its worker, without the packages that training needs. So it imports nothing.
"""
