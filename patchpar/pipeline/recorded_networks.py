"""What networks of a pipeline return in a call, so that a second call of the pipeline need not compute it again."""

from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from patchpar.comm.pytree import map_leaves, map_tensors, tensors_in
from patchpar.models.encoders import encoders_of
from patchpar.models.info import denoisers_of, networks_of
from patchpar.shard.hooks import HookSet

Shapes = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class RecordedOutput:
    """What a network has returned, in lists and dicts of its own, and the shapes of the tensors it was called with."""

    shapes: Shapes
    output: Any


class RecordedNetworks:
    """Outputs of the networks of a pipeline but its VAEs, in one call of it.

    Those before the first call of a denoiser are kept, such as embeddings of the prompt. Of a denoiser, and of what is
    called in its steps, the latest of each shape is kept, without its values.
    """

    def __init__(self, pipe: Any) -> None:
        self._pipe = pipe
        self._denoisers = frozenset(denoisers_of(pipe))
        self._is_denoising = False
        self._encoded: defaultdict[str, list[RecordedOutput]] = defaultdict(list)
        self._in_steps: defaultdict[str, dict[Shapes, RecordedOutput]] = defaultdict(dict)

    def hooks(self) -> HookSet:
        """Return hooks that record."""
        hooks = HookSet()
        for name, network in all_but_vaes(self._pipe).items():
            hooks.after(network, partial(self._record, name), with_kwargs=True)
        return hooks

    def _record(self, name: str, _: nn.Module, args: Any, kwargs: Mapping[str, Any], output: Any) -> None:
        shapes = _shapes(args, kwargs)
        self._is_denoising |= name in self._denoisers
        if self._is_denoising:
            self._in_steps[name][shapes] = RecordedOutput(shapes, map_tensors(_without_values, output))
        else:
            self._encoded[name].append(RecordedOutput(shapes, map_leaves(lambda leaf: leaf, output)))

    def stand_ins(self) -> dict[str, "NetworkStandIn"]:
        """Return what can be called instead of the networks that have been called, by the names of these."""
        encoders = encoders_of(self._pipe)
        return {
            name: NetworkStandIn(
                network, self._encoded.get(name, ()), self._in_steps.get(name, {}), is_encoder=name in encoders
            )
            for name, network in all_but_vaes(self._pipe).items()
            if name in self._encoded or name in self._in_steps
        }


class NetworkStandIn:
    """Answers calls of a network by what it has returned; zeros where values are not kept. All else is the network's.

    `encoded`: in order. `in_steps`: by the shapes of arguments, the latest last. An encoder that is called once more
    computes, and another network, such as a ControlNet before the second step, answers as before.
    """

    def __init__(
        self,
        network: nn.Module,
        encoded: Collection[RecordedOutput],
        in_steps: Mapping[Shapes, RecordedOutput],
        *,
        is_encoder: bool,
    ) -> None:
        self._network, self._encoded, self._in_steps = network, list(encoded), in_steps
        self._again = None if is_encoder else next(reversed([*encoded, *in_steps.values()]), None)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """The network's, since pipelines ask for it."""
        return type(self._network)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._network, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the next output for arguments of these shapes, else the latest output of it."""
        shapes = _shapes(args, kwargs)
        for number, each in enumerate(self._encoded):
            if each.shapes == shapes:
                return map_tensors(_own, self._encoded.pop(number).output)
        found = self._in_steps.get(shapes) or self._again
        return self._network(*args, **kwargs) if found is None else map_tensors(_own, found.output)


def all_but_vaes(pipe: Any) -> dict[str, nn.Module]:
    """Return the networks of a pipeline that are no VAEs, by name."""
    return {name: each for name, each in networks_of(pipe).items() if not hasattr(each, "decode")}


def _shapes(args: Any, kwargs: Mapping[str, Any]) -> Shapes:
    return tuple(tuple(x.shape) for x in tensors_in((list(args), dict(kwargs))))


def _without_values(x: Tensor) -> Tensor:
    return torch.zeros((), dtype=x.dtype, device=x.device).expand(x.shape)


def _own(x: Tensor) -> Tensor:
    """Return a copy, which the second call may change, as those of T2I adapters do."""
    return x.clone(memory_format=torch.contiguous_format)
