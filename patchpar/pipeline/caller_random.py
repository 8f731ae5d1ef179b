"""Random numbers of the caller's process: what ranks begin with, and where its generators are after a call."""

import sys
from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import Any

from patchpar.launch import accelerators
from patchpar.pipeline.messages import CallResult, RandomState
from patchpar.shard.generators import generators_of


def caller_random_state() -> RandomState:
    """Return this process's random state, so that torch.manual_seed has the same effect as with plain diffusers.

    A process that has not imported torch cannot have seeded it; then a random seed is used on all ranks.
    """
    torch = sys.modules.get("torch")
    if torch is None:
        import random

        return RandomState(seed=random.SystemRandom().getrandbits(63))
    used = accelerators.used_device()
    return RandomState(cpu=torch.get_rng_state(), gpu=None if used is None else accelerators.random_state(used))


def sampled_seed(kwargs: Mapping[str, Any]) -> int:
    """Return a seed that follows from the first generator among the arguments of a call, whose state stays as it is.

    Without one torch's default generator samples it; it is a random one if this process has not imported torch.
    """
    given = generators_of(kwargs)
    if given:
        return int.from_bytes(sha256(given[0].get_state().numpy().tobytes()).digest()[:8], "big") >> 2
    torch = sys.modules.get("torch")
    if torch is None:
        import random

        return random.SystemRandom().getrandbits(62)
    return int(torch.randint(2**62, ()))


def move_generators_on(kwargs: Mapping[str, Any], results: Sequence[CallResult]) -> None:
    """Set the caller's generators and torch's default ones to the states after the call on the ranks."""
    states = [state for result in results if result.output is not None for state in result.generators]
    set_generators(generators_of(kwargs), states, results[0].random)


def set_generators(generators: Sequence[Any], states: Sequence[Any], after: RandomState | None) -> None:
    """Set generators to their states on a rank, and torch's default ones to `after`, if there is one."""
    for generator, state in zip(generators, states, strict=False):
        generator.set_state(state)
    if after is None:
        return
    torch = sys.modules["torch"]
    torch.set_rng_state(after.cpu)
    used = accelerators.used_device()
    if after.gpu is not None and used is not None:
        accelerators.set_random_state(after.gpu, used)
