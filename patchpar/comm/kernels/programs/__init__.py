"""Triton programs. Only launchers in `comm.kernels` import them, so that Triton is loaded at the first launch."""
