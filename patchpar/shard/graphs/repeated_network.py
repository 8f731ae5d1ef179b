"""What a graph repeats of a network though nobody passes it, and why steps of a network cannot be repeated."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from patchpar.shard.fingerprint import FACTORS, SKIPPED, Fingerprint
from patchpar.shard.hooks import hooks_of
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
    return ""


def baked_in(network: nn.Module) -> Any:
    """Return what a graph repeats though nobody passes it: addresses of weights, and factors that Python multiplies."""
    weights = (*network.parameters(), *network.buffers())
    addresses = tuple(x.data_ptr() for weight in weights for x in plain_tensors(weight))
    of_all = _attributes(network)
    factors = tuple(repr(attributes[name]) for _, attributes in of_all for name in FACTORS if name in attributes)
    return addresses, factors


def _attributes(network: nn.Module) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the path of each module with its attributes, and with those of its processor."""
    for path, module in network.named_modules():
        for each in (module, getattr(module, "processor", None)):
            yield path, getattr(each, "__dict__", {})


def kept_tensors(network: nn.Module) -> dict[tuple[str, str], list[Tensor]]:
    """Return the tensors, of any shape, that modules and their processors keep beside weights: by path and attribute.

    A forward may read them, as values that it computes once for all steps, or leave them for code that reads them.
    """
    found: dict[tuple[str, str], list[Tensor]] = {}
    for path, attributes in _attributes(network):
        for name, value in attributes.items():
            if name not in SKIPPED and (tensors := [x for x in tree_leaves(value) if isinstance(x, Tensor)]):
                found[path, name] = tensors
    return found


def why_read_elsewhere(before: Mapping[tuple[str, str], Sequence[Tensor]], network: nn.Module) -> str:
    """Return why a captured step cannot be replayed if it has left other tensors in modules; empty if it has not.

    `before`: its `kept_tensors`, of any shape. A replay leaves nothing, and the next graph would be read there.
    """
    for (path, name), tensors in kept_tensors(network).items():
        if [id(x) for x in tensors] != [id(x) for x in before.get((path, name), ())]:
            return f"{name} of {path or 'the denoiser'} keeps tensors of each step, for code that reads them afterwards"
    return ""
