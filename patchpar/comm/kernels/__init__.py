"""Fused kernels of messages, and what registers those of all packages: each is a torch operator `patchpar::...`."""
