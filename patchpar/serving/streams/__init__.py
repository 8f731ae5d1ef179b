"""`patchpar serve` with a streaming model: streams with controls, and their videos."""
