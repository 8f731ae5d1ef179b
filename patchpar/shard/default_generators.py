"""The default generators of a rank: those of the CPU and of its GPU. torch.manual_seed would set those of all GPUs."""

import torch

from patchpar.launch.accelerators import random_state, set_random_state


class DefaultGenerators:
    """Their states when this is made, for `device` and the CPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._of_cpu, self._of_device = torch.get_rng_state(), random_state(device)

    def restore(self) -> None:
        """Set these states."""
        torch.set_rng_state(self._of_cpu)
        if self._of_device is not None:
            set_random_state(self._of_device, self.device)
