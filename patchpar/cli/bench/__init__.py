"""`patchpar bench`: plans beside one process, on any model and prompts, as one table and one plot."""
