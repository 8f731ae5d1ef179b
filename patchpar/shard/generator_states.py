"""States of random generators, to go back to: those of a call's arguments, and the default ones of a rank.

The default ones are those of the CPU and of its GPU. torch.manual_seed would set those of all GPUs.
"""

from collections.abc import Mapping
from typing import Any

import torch

from patchpar.launch.accelerators import random_state, set_random_state
from patchpar.shard.generators import generators_of


class GeneratorStates:
    """The states, when this is made, of generators among `arguments`, and of the default ones of `device` and CPU."""

    def __init__(self, arguments: Mapping[str, Any], device: torch.device) -> None:
        self.device, self._generators = device, generators_of(arguments)
        self._states = [generator.get_state() for generator in self._generators]
        self._of_cpu, self._of_device = torch.get_rng_state(), random_state(device)

    def restore(self, *, default: bool = True) -> None:
        """Set all generators to these states, the default ones only with `default`."""
        if default:
            torch.set_rng_state(self._of_cpu)
        if default and self._of_device is not None:
            set_random_state(self._of_device, self.device)
        for generator, state in zip(self._generators, self._states, strict=True):
            generator.set_state(state)
