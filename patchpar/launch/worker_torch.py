"""How torch is set up in a worker, before a model arrives."""

FIRST_HOOK_ID = 1 << 40
"""Of hooks that are registered in a worker. A module keeps them by ID, and each process counts IDs from 0: those that a
module has brought from the caller's process would be replaced, without a word, by others on the same module."""


def prepare_torch(threads: int) -> str:
    """Set the number of threads, and the IDs of hooks. Returns torch's version."""
    import torch
    from torch.utils.hooks import RemovableHandle

    torch.set_num_threads(threads)
    RemovableHandle.next_id = max(RemovableHandle.next_id, FIRST_HOOK_ID)
    return str(torch.__version__)
