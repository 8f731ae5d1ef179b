"""What a graph repeats of a network though nobody passes it, and why steps of a network cannot be repeated."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves

from patchpar.shard.fingerprint import CODE, DEPTH, FACTORS, SKIPPED, Fingerprint
from patchpar.shard.hooks import hooks_of, is_ours
from patchpar.shard.weights.packed import plain_tensors


def why_not_repeated(network: nn.Module, before: Fingerprint, now: Fingerprint) -> str:
    """Return why steps of a network cannot be captured; empty if they can.

    `before` and `now`: its fingerprints at two steps of one kind, in which nobody changed it from outside.
    """
    if now.foreign:
        return f"{now.foreign[0]} is code of another library, which may decide in each step what to compute"
    for path, module in network.named_modules():
        names = [name for name, _ in hooks_of(module)] + (["accelerate's"] if hasattr(module, "_hf_hook") else [])
        if names:
            return f"hook {names[0]} on {path or 'the denoiser'} may move weights or skip layers in each step"
    changed = sorted(before.differences(now))
    if changed:
        path, name = changed[0]
        return f"{name} of {path or 'the denoiser'} changes from step to step"
    if torch.is_grad_enabled() and any(x.requires_grad for x in network.parameters()):
        return "its weights require gradients, which a graph does not compute"
    return ""


def baked_in(network: nn.Module) -> Any:
    """Return what a graph repeats though nobody passes it: where weights lie, modes, and factors of adapters."""
    weights = (*network.parameters(), *network.buffers())
    addresses = tuple(map(_address_of, weights))
    trained = tuple(module.training for module in network.modules()), any(x.requires_grad for x in weights)
    factors = tuple(
        baked(attributes[name]) for _, attributes in _attributes(network) for name in FACTORS if name in attributes
    )
    return addresses, trained, factors


def _address_of(x: Tensor) -> Any:
    """Return where a tensor of any shape lies, and how; of a tensor around others, where these lie."""
    return tuple((each.data_ptr(), tuple(each.shape), each.stride(), each.dtype) for each in plain_tensors(x))


def baked(factor: Any) -> Any:
    """Return the numbers of a factor, or of several, and where those lie that are tensors: a graph reads these."""
    leaves, form = tree_flatten(factor)
    return str(form), tuple(_address_of(x) if isinstance(x, Tensor) else repr(x) for x in leaves)


def _attributes(network: nn.Module) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the path of each module with the attributes of its processor, and with its own."""
    for path, module in network.named_modules():
        for each in (getattr(module, "processor", None), module):
            yield path, getattr(each, "__dict__", {})


@dataclass(frozen=True, slots=True, eq=False)
class KeptTensors:
    """Tensors, of any shape, in an attribute of a module or its processor, and of objects in these, as they were."""

    path: str
    name: str
    owner: Mapping[str, Any]
    tensors: tuple[Tensor, ...]
    addresses: tuple[Any, ...]

    @property
    def are_there(self) -> bool:
        """Whether the attribute has them still, at their addresses."""
        now = tuple(_tensors_in(self.owner.get(self.name)))
        same = len(now) == len(self.tensors) and all(x is y for x, y in zip(now, self.tensors, strict=True))
        return same and tuple(map(_address_of, now)) == self.addresses


def kept_tensors(network: nn.Module) -> dict[tuple[str, str], KeptTensors]:
    """Return what modules and their processors keep beside weights: by path and attribute.

    A forward may read it, as values that it computes once for all steps, or leave it for code that reads it.
    """
    found: dict[tuple[str, str], KeptTensors] = {}
    for path, attributes in _attributes(network):
        for name, value in attributes.items():
            if name not in SKIPPED and (tensors := tuple(_tensors_in(value))):
                found[path, name] = KeptTensors(path, name, attributes, tensors, tuple(map(_address_of, tensors)))
    return found


def _tensors_in(value: Any, depth: int = DEPTH) -> Iterator[Tensor]:
    """Yield the tensors, of any shape, in a tree of values, and in attributes of objects in it."""
    for x in tree_leaves(value):
        if isinstance(x, Tensor):
            yield x
        elif depth and not isinstance(x, (nn.Module, *CODE)) and not is_ours(x):
            for each in getattr(x, "__dict__", {}).values():
                yield from _tensors_in(each, depth - 1)


def why_read_elsewhere(before: Mapping[tuple[str, str], KeptTensors], network: nn.Module) -> str:
    """Return why a captured step cannot be replayed if it has left other tensors in modules; empty if it has not.

    `before`: its `kept_tensors`. A replay leaves nothing, and the next graph would be read there.
    """
    for (path, name), kept in kept_tensors(network).items():
        known = before.get((path, name))
        if known is None or [id(x) for x in kept.tensors] != [id(x) for x in known.tensors]:
            return f"{name} of {path or 'the denoiser'} keeps tensors of each step, for code that reads them afterwards"
    return ""
