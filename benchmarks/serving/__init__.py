"""What `patchpar serve` costs beside its calls, and what its policies are worth on a mix of requests."""
