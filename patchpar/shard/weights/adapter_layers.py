"""Weights of adapters in a network: whole on every rank, since methods put them there and take them away."""

from torch import nn

LAYERS = "adapter_layer_names"
"""Attribute of PEFT's layers: the names of those attributes that hold weights of adapters."""


def adapter_modules(network: nn.Module) -> set[nn.Module]:
    """Return the modules with weights of PEFT's adapters, those below them too. PEFT is not imported."""
    found = set[nn.Module]()
    for module in network.modules():
        for name in getattr(module, LAYERS, ()):
            part = getattr(module, name, None)
            if isinstance(part, nn.Module):
                found.update(part.modules())
    return found
