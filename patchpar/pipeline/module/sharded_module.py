"""One rank's copy of a network whose calls several ranks compute together.

handle = shard_module(network, patch=2)      in each of two processes of torchrun
handle.begin()                               before each image
noise = network(latents, t, text)            whole tensors in, whole tensors out, on every rank
handle.step()                                after each step of the scheduler
handle.remove()                              the network is as before
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from patchpar.comm.collectives import Communicator
from patchpar.comm.pytree import on_own_lists, with_own_lists
from patchpar.comm.transport import Transport, connect_group
from patchpar.errors import PlanError
from patchpar.launch.accelerators import current_device
from patchpar.pipeline.module.options import ModuleOptions
from patchpar.plan.plan import Plan
from patchpar.plan.step_clock import StepClock
from patchpar.shard.compiled import is_compiled
from patchpar.shard.hooks import ForwardHook, HookSet
from patchpar.shard.precision import autocast_dtype
from patchpar.shard.unsupported_model import refuse_gradients, refused_in_words

HOOK = "patchpar_module"
WAY_OUT = "Run it on one device"
_HANDLES: WeakKeyDictionary[nn.Module, ref[ShardedModule]] = WeakKeyDictionary()
"""Of the networks that are split: hooks of two handles would split the parts again."""


class ShardedModule:
    """A network, split between `ranks` of a transport, until `remove`. Every rank passes and gets whole tensors.

    All ranks make the same calls, of the network and of this handle, in the same order.
    """

    def __init__(self, module: nn.Module, transport: Transport, ranks: tuple[int, ...], options: ModuleOptions) -> None:
        if is_compiled(module):
            raise PlanError(
                f"{type(module).__name__} is compiled as a whole, and functions in its graph cannot be replaced: "
                "compile its blocks instead, or none"
            )
        taken = _HANDLES.get(module)
        if taken is not None and taken() is not None:
            raise PlanError(
                f"this {type(module).__name__} is split between ranks already: close that team, or remove() its handle"
            )
        self.module, self.transport, self.options = module, transport, options
        mesh = options.plan.mesh(transport.rank, ranks)
        if mesh is None:
            raise PlanError(f"rank {transport.rank} is none of {ranks}, which share the work")
        self._clock, self._has_begun = StepClock(), False
        self.comm = Communicator(transport)
        self.denoiser = options.plan.strategy.install(
            module,
            self.comm,
            mesh["patch"],
            clock=self._clock,
            split=options.plan.split,
            verifications=options.verifications_of(module),
        )
        self.denoiser.ignored = frozenset(options.ignore)
        self._hooks = HookSet()
        self._autocast = autocast_dtype(transport.device.type)  # under which the latest call was computed
        _HANDLES[module] = ref(self)

    def take_calls(self) -> None:
        """Let every call of the network be one that ranks compute together."""
        self._hooks.install(self.module, ForwardHook(lambda _, *call: self.call(*call)), HOOK)

    def begin(self) -> None:
        """Begin an image: values of the last one are not used. Raises ExchangeError."""
        with self._on_device():
            self.denoiser.finish()
            self._clock.reset()
            self.denoiser.reset()
        self._has_begun = True

    def step(self) -> None:
        """End a step of the scheduler, in which the network may have been called several times."""
        self._clock.tick()

    @property
    def error(self) -> float | None:
        """Relative error of the split call against the plain one at first use; None where it was not compared."""
        return self.denoiser.error

    def control(self, *, exchange: str) -> None:
        """Set the exchange to "off", which gives wrong results, as the negative control of tests; "on" is right."""
        self.denoiser.exchange = exchange

    def call(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what `forward`, the network's own, returns for the whole call.

        Raises UnsupportedModel, VerificationError, PlanError, ExchangeError.
        """
        plan = self.options.plan
        if plan.patch == 1:
            return forward(*args, **kwargs)
        if self.module.training:
            refuse_dropout(self.module)
        if self.denoiser.history is not None and not self._has_begun:
            raise PlanError(
                f"strategy {plan.strategy} uses values of the step before: call begin() before each image and step() "
                "after each step of the scheduler, or use strategy=exact"
            )
        refuse_gradients(self.module, str(plan), (args, kwargs))
        if (autocast := autocast_dtype(self.transport.device.type)) != self._autocast:  # which rounds in another way
            self._autocast = autocast
            self.forget()
        self._clock.next_call()
        args, kwargs = with_own_lists((args, kwargs))  # some models write into them
        plain, start = partial(forward, *with_own_lists(args), **with_own_lists(kwargs)), time.perf_counter()
        with self._on_device(), refused_in_words(self.module, str(plan), WAY_OUT, plain):
            output = self.denoiser.denoise(on_own_lists(forward), *args, **kwargs)
        seconds = time.perf_counter() - start  # another rank may take as long before it sends anything
        self.transport.deadline = max(self.transport.deadline, self.options.deadline + 2 * seconds)
        return output

    def _on_device(self) -> AbstractContextManager[None]:
        """Return a context in which the network's device is the current one, of which kernels and events are.

        A script may have put the network on cuda:1 and say nothing else.
        """
        return current_device(str(self.transport.device))

    def forget(self) -> None:
        """Find anew how calls are divided, and compare the next one, since the network may have changed."""
        self.denoiser.forget()

    def discard(self) -> None:
        """Discard what a call that has failed left behind. The next image begins with `begin`."""
        self.denoiser.discard()
        self._has_begun = False

    def remove(self) -> None:
        """Leave the network as it was. Idempotent."""
        if (taken := _HANDLES.get(self.module)) is not None and taken() is self:
            del _HANDLES[self.module]
        self.denoiser.restore()
        self._hooks.close()


def shard_module(  # noqa: PLR0913 - each is a setting of its own, by name
    module: nn.Module,
    *,
    patch: int,
    strategy: Any = "exact",
    split: str = "auto",
    ratio: Iterable[int] = (),
    group: Any = None,
    verify: bool | Path = True,
    ignore: Iterable[str] = (),
    deadline: float = 60.0,
) -> ShardedModule:
    """Let `patch` processes compute the calls of a network together. Each calls this with its own copy, and is on it.

    The network is one of any library, in eval mode: convolutions and group norms are split into bands of the first
    argument [B, C, H, W] or [B, C, F, H, W], else tokens are. torch.distributed is initialised, by torchrun for
    example; `group`: its ProcessGroup of those that work together (default: all); all processes call this at the same
    time, each with its own group. `strategy`, `split`, `ratio`: see Plan. `verify`: compare the split call with the
    plain one at first use, and with a folder keep the result there. `ignore`: names of arguments, such as dicts of
    options, in which numbers and texts differ from call to call without effect on how a call can be split. `deadline`:
    seconds that a rank may wait for another.

    Raises PlanError, LaunchError, ExchangeError, UnsupportedModel.
    """
    plan = Plan(patch=patch, strategy=strategy, split=split, ratio=tuple(ratio))
    options = ModuleOptions.of(plan, verify=verify, ignore=ignore, deadline=deadline)
    transport, ranks = connect_group(device_of(module), options.deadline, group)
    if len(ranks) != patch:
        transport.close()
        raise PlanError(f"patch={patch}, but the group has {len(ranks)} processes: use patch={len(ranks)}")
    handle = ShardedModule(module, transport, ranks, options)
    handle.take_calls()
    return handle


def device_of(module: nn.Module) -> torch.device:
    """Return the device of a network's weights. Raises PlanError where they are on several, or there are none."""
    devices = {x.device for x in (*module.parameters(), *module.buffers())}
    if len(devices) != 1:
        found = ", ".join(sorted(map(str, devices))) or "no device, since it has no weights"
        raise PlanError(f"{type(module).__name__} is on {found}: each copy has to be on one device as a whole")
    return devices.pop()


def refuse_dropout(module: nn.Module) -> None:
    """Raise PlanError for a network in train mode that drops values at random: each rank would drop others."""
    for name, each in module.named_modules():
        if isinstance(each, _DropoutNd) and each.training and each.p > 0:
            raise PlanError(
                f"{type(module).__name__} is in train mode, in which {name} drops values at random, others on each "
                "rank: call eval() first"
            )
