"""Fused kernels: operations that are several launches in torch, and one here. Each is a torch operator `patchpar::...`.

A module has the operation's eager twin (plain torch functions, for every other device), its fake kernel for tracing,
and its launcher on GPUs. The Triton programs are in `programs/`, imported at the first launch.
"""
