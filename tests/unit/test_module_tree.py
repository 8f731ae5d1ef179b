"""The modules of a network, listed at once, are those of torch's iterators, in their order."""

from __future__ import annotations

import pytest
from torch import nn

from patchpar.shard.module_tree import modules_of, named_modules_of
from tests import tiny


def shared() -> nn.Module:
    """One module in two places, one place without a module, and a module in itself."""
    part = nn.Sequential(nn.Linear(2, 2), nn.SiLU())
    network = nn.ModuleDict({"first": part, "second": nn.ModuleList([part, nn.Linear(2, 2)])})
    network.register_module("nothing", None)
    network["second"].add_module("outer", part)
    return network


@pytest.mark.parametrize("name", ["shared", "flux", "sd"])
def test_modules_are_those_of_torch_in_their_order(name: str) -> None:
    networks = [shared()] if name == "shared" else [*tiny.build(name).pipe.components.values()]
    for network in networks:
        if isinstance(network, nn.Module):
            assert named_modules_of(network) == list(network.named_modules())
            assert modules_of(network) == list(network.modules())
