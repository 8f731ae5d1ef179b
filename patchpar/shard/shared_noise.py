"""Random numbers that the first rank samples for all, of ranks that would sample others from the same state.

GPUs of different kinds would: each thread of torch's kernels has a sequence of its own, and a large tensor is sampled
by as many threads as the GPU has (`patchpar.launch.accelerators.random_width`).

    every rank      samples, and tells all others what: function, shape, dtype
    the first       also sends the values, and the state in which its generator is then
    the others      take both in place of their own

So all ranks go on as the first one does, with what is not sampled by torch's functions too. A rank that leaves one out
is missed by all, since each tells each: a wait for it ends as in every exchange. That goes through the host, where the
size of a message is known: over NCCL, two exchanges that do not belong together might be taken for one.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch import Tensor

from patchpar.comm.collectives import AllGather, AxisComm
from patchpar.comm.transport import TensorSpec
from patchpar.errors import PlanError
from patchpar.launch import accelerators
from patchpar.shard.generators import SAMPLE_ON_CPU
from patchpar.shard.hooks import HookSet

FUNCTIONS = (
    *("rand", "rand_like", "randn", "randn_like", "randint", "randint_like", "randperm"),
    *("normal", "bernoulli", "multinomial", "poisson", "binomial"),
)
METHODS = (
    *("normal_", "uniform_", "random_", "exponential_", "bernoulli_", "log_normal_", "cauchy_", "geometric_"),
    *("bernoulli", "multinomial"),
)
"""All that samples: functions of torch, and methods of its tensors."""
_sharing: ContextVar[str] = ContextVar("sharing", default="on")


@contextmanager
def sampled_on_one_rank() -> Iterator[None]:
    """While open, the ranks of an image do different things, and what the first one samples is for itself."""
    yield from _sharing_is("of one image")


@contextmanager
def sampled_in_vain() -> Iterator[None]:
    """While open, nobody uses what is sampled, and its traces are removed afterwards."""
    yield from _sharing_is("off" if _sharing.get() == "on" else _sharing.get())


def _sharing_is(value: str) -> Iterator[None]:
    token = _sharing.set(value)
    try:
        yield
    finally:
        _sharing.reset(token)


class NoiseOfFirst:
    """Samples on the ranks of `mesh` what its first rank does, by generators of the type of `device`.

    `images`: how many parts of the ranks make images of their own, by axis `data`.
    """

    def __init__(self, mesh: AxisComm, device: torch.device, *, images: int = 1) -> None:
        self._comm, self._axis = mesh
        self._device, self._images, self._count = device, images, 0
        self._comm.host.traffic = self._comm.traffic  # what is sent through either counts

    @contextmanager
    def open(self) -> Iterator[None]:
        """Replace all functions that sample, in this process. They raise PlanError, ExchangeError."""
        with HookSet() as hooks:
            for name in FUNCTIONS:
                hooks.replace(torch, name, partial(self._sampled, name, getattr(torch, name)))
            for name in METHODS:
                hooks.replace(torch.Tensor, name, _method(partial(self._sampled, name, getattr(torch.Tensor, name))))
            yield

    def _sampled(self, name: str, plain: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        """Return what the first rank samples by `plain`, of any shape, the same on all ranks."""
        before, generator = self._count, kwargs.get("generator")
        x = plain(*args, **kwargs)
        device = x.device if generator is None else generator.device
        if device.type != self._device.type or self._count > before:  # within, a mode has sampled the whole of it
            return x
        if _sharing.get() == "on":
            self._take(name, x, generator)
        elif _sharing.get() == "of one image" and self._images > 1:
            raise PlanError(
                f"on axis 'data' one rank of each image samples ({name}) in a network that its other ranks do not run, "
                f"on GPUs of different kinds, which sample different noise: {SAMPLE_ON_CPU}, or data=1"
            )
        return x

    def _take(self, name: str, x: Tensor, generator: torch.Generator | None) -> None:
        """Overwrite `x`, of any shape, and the state of its generator by those of the first rank."""
        self._count += 1
        where, axis = f"noise {self._count} ({name})", self._axis
        own = f"{name} {tuple(x.shape)} {str(x.dtype).removeprefix('torch.')}".encode()
        state = self._state(generator).cpu().numpy().tobytes()
        found = AllGather(self._comm.host, axis, "noise", where).of_bytes(own + b"\0" + state)
        whats, states = zip(*(each.split(b"\0", 1) for each in found), strict=True)
        if len(set(whats)) > 1:
            each = ", ".join(f"rank {rank} {what.decode()}" for rank, what in zip(axis.ranks, whats, strict=True))
            raise PlanError(
                f"the GPUs are of different kinds, so that rank {axis.ranks[0]} samples for all, but here they sample "
                f"different tensors: {each}. Each rank has to sample the same: {SAMPLE_ON_CPU}"
            )
        if axis.rank == 0:
            self._comm.send("noise", where, axis.other_ranks, (x.detach().contiguous(),)).wait()
            return
        [[values]] = self._comm.receive("noise", where, axis.ranks[0], (TensorSpec.of(x),)).wait()
        x.detach().copy_(values)
        self._set_state(generator, torch.frombuffer(bytearray(states[0]), dtype=torch.uint8))

    def _state(self, generator: torch.Generator | None) -> Tensor:
        """Return the state of a generator, or of this device's own, uint8 [N]."""
        if generator is not None:
            return generator.get_state()
        state = accelerators.random_state(self._device)
        return torch.get_rng_state() if state is None else state

    def _set_state(self, generator: torch.Generator | None, state: Tensor) -> None:
        if generator is not None:
            generator.set_state(state)
        elif accelerators.is_accelerator(str(self._device)):
            accelerators.set_random_state(state, self._device)
        else:
            torch.set_rng_state(state)


def _method(sample: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a function that is bound to its tensor as a method is; a partial would not be."""
    return lambda *args, **kwargs: sample(*args, **kwargs)
