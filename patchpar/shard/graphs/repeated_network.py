"""What a graph repeats of a network though nobody passes it, and why steps of a network cannot be repeated."""

from typing import Any

from torch import nn

from patchpar.shard.fingerprint import FACTORS, Fingerprint
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
    holders = [each for module in network.modules() for each in (module, getattr(module, "processor", None))]
    facts = [getattr(each, "__dict__", {}) for each in holders]
    factors = tuple(repr(attributes[name]) for attributes in facts for name in FACTORS if name in attributes)
    return addresses, factors
