"""Free memory of a rank's GPU."""

import torch


def free_on(device: torch.device) -> int | None:
    """Return the bytes that tensors may still take on a GPU: free in the driver, or reserved by torch and unused.

    None for the CPU: all ranks share its memory, which the caller has checked.
    """
    if device.type != "cuda":
        return None
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
