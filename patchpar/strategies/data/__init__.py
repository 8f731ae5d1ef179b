"""Prompts of one call on the ranks of axis `data`.

As `split_between_processes` in https://huggingface.co/docs/diffusers/training/distributed_inference, inside one call.
"""
