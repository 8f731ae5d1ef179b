"""Random numbers of a call on one rank: the state of the default generators, a generator for a job of a seed, noise.

The default generators belong to a whole process. A rank in a process of its own sets them; a rank in the caller's
process leaves them alone during a job, since other threads of the caller use them meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from patchpar.comm.collectives import Communicator
from patchpar.launch import accelerators
from patchpar.models.call_parameters import parameters_of
from patchpar.pipeline.messages import CallOptions, RandomState
from patchpar.plan.mesh import Mesh
from patchpar.shard.generators import generators_of
from patchpar.shard.shared_noise import NoiseOfFirst
from patchpar.strategies.data.split import as_one_call


def take_random_state(state: RandomState, device: torch.device) -> None:
    """Set torch's random state to the caller's, so that a call without a generator gives the image of plain diffusers.

    Of the CPU and of this rank's device: other devices of its process may be those of other ranks, or the caller's. A
    rank on a GPU takes the seed, or the state of the caller's GPU, or else a seed sampled from the CPU state.
    """
    if state.seed is None:
        torch.set_rng_state(state.cpu)
    else:
        torch.default_generator.manual_seed(state.seed)
    if not accelerators.is_accelerator(str(device)):
        return
    if state.seed is None and state.gpu is not None:
        accelerators.set_random_state(state.gpu, device)
    else:
        seed = int(torch.randint(2**62, ())) if state.seed is None else state.seed
        with accelerators.current_device(str(device)):
            accelerators.device_module(device.type).manual_seed(seed)


def with_generator_of_seed(pipe: Any, kwargs: Mapping[str, Any], state: RandomState | None) -> Mapping[str, Any]:
    """Return the arguments of a call with a generator of the CPU for the seed of `state`.

    The same arguments without a seed, with a generator among them, and where the pipeline takes none.
    """
    if state is None or state.seed is None or generators_of(kwargs) or "generator" not in parameters_of(type(pipe)):
        return kwargs
    return {**kwargs, "generator": torch.Generator().manual_seed(state.seed)}


@contextmanager
def taken_random_state(
    pipe: Any, kwargs: Mapping[str, Any], options: CallOptions, device: torch.device, *, is_callers: bool
) -> Iterator[Mapping[str, Any]]:
    """Set torch's random state to that of `options`, if there is one, and return the arguments for the pipeline.

    `is_callers`: this is the caller's process, where a seed is not left behind, nor set if there is a generator.
    """
    state = options.random
    if options.plan.data == 1:  # else noise for all prompts is sampled as the caller's arguments say
        kwargs = with_generator_of_seed(pipe, kwargs, state)
    is_apart = is_callers and state is not None and state.seed is not None
    if state is None or (is_apart and generators_of(kwargs)):
        yield kwargs
        return
    before = random_state(device) if is_apart else None
    take_random_state(state, device)
    try:
        yield kwargs
    finally:
        if before is not None:
            take_random_state(before, device)


class MethodRandom:
    """Context of a method that gets the caller's random state, if there is one, as every rank does.

    `after`: the state that the caller takes then; None where the method has sampled nothing.
    """

    def __init__(self, state: RandomState | None, device: torch.device) -> None:
        self._given, self._device = state, device
        self.after: RandomState | None = None

    def __enter__(self) -> MethodRandom:
        if self._given is not None:
            take_random_state(self._given, self._device)
            self._begin = random_state(self._device)
        return self

    def __exit__(self, *_: object) -> None:
        if self._given is None or self._given.cpu is None:
            return
        begin, end = self._begin, random_state(self._device)
        pairs = [(begin.cpu, end.cpu), *([] if begin.gpu is None else [(begin.gpu, end.gpu)])]
        self.after = None if all(torch.equal(one, other) for one, other in pairs) else end


@contextmanager
def own_part(
    pipe: Any, kwargs: dict[str, Any], mesh: Mesh | None, noise: NoiseOfFirst | None
) -> Iterator[dict[str, Any]]:
    """Yield the arguments for this rank's prompts; while open, noise is as `noise` has it, and of one call for all."""
    with ExitStack() as stack:
        if noise is not None:
            stack.enter_context(noise.open())  # beneath the other: of all prompts
        if mesh is not None and mesh["data"].size > 1:
            kwargs = stack.enter_context(as_one_call(pipe, kwargs, mesh["data"].rank, mesh["data"].size))
        yield kwargs


def shared_noise(
    options: CallOptions, mesh: Mesh | None, comm: Communicator | None, device: torch.device
) -> NoiseOfFirst | None:
    """Return what samples on the first of the call's ranks, if it is to; None where each samples for itself."""
    if not options.noise_of_first or mesh is None or comm is None:
        return None
    return NoiseOfFirst((comm, mesh.of_all()), device, images=mesh["data"].size)


def random_state(device: torch.device) -> RandomState:
    """Return the state of this rank's default generators."""
    return RandomState(cpu=torch.get_rng_state(), gpu=accelerators.random_state(device))
