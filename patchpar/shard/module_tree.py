"""The modules of a network in torch's order, listed at once: its own iterators take several times as long."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the controller starts its workers before it imports torch
    from torch import nn


def named_modules_of(network: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return path and module of all that `network.named_modules()` yields."""
    found: list[tuple[str, nn.Module]] = []
    _add(network, "", set(), found)
    return found


def modules_of(network: nn.Module) -> list[nn.Module]:
    """Return all that `network.modules()` yields."""
    found: dict[nn.Module, None] = {}
    _add_module(network, found)
    return list(found)


def _add(module: nn.Module, path: str, known: set[nn.Module], found: list[tuple[str, nn.Module]]) -> None:
    if module in known:
        return
    known.add(module)
    found.append((path, module))
    inside = f"{path}." if path else ""
    for name, part in module._modules.items():
        if part is not None:
            _add(part, f"{inside}{name}", known, found)


def _add_module(module: nn.Module, found: dict[nn.Module, None]) -> None:
    if module in found:
        return
    found[module] = None
    for part in module._modules.values():
        if part is not None:
            _add_module(part, found)
