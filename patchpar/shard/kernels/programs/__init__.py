"""Triton programs. Only launchers in `shard.kernels` import them, so that Triton is loaded at the first launch."""
