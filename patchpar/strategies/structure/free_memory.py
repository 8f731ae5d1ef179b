"""How much memory a rank's device has left, as far as it is the rank's own: what host memory holds is shared."""

import torch


def free_on(device: torch.device) -> int | None:
    """Bytes that tensors may still take on a GPU: what its driver has, and what torch holds and does not use.

    None for the CPU, whose memory all ranks share: the caller has looked at it.
    """
    if device.type != "cuda":
        return None
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
