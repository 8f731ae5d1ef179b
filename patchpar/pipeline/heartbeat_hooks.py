"""Heartbeats from inside a long forward: one for every block that a rank enters.

Without exchanges a denoiser call has no heartbeat until it returns, which on a slow device may take longer than the
deadline. Blocks are the elements of module lists: about a hundred per call, a few microseconds each.
"""

from collections.abc import Callable
from typing import Any

from torch import nn

from patchpar.shard.compiled import is_compiled
from patchpar.shard.hooks import HookSet


class HeartbeatHooks(HookSet):
    """Heartbeats in all blocks of all networks of a pipeline, until `close`."""

    def __init__(self, pipe: Any, beat: Callable[[str], object]) -> None:
        super().__init__()
        for name, network in pipe.components.items():
            if isinstance(network, nn.Module):
                for path, block in blocks(network):
                    self.before(block, _beat_hook(beat, f"{name}.{path}"))


def blocks(network: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return path and module of every element of a module list in `network`, except in compiled modules."""
    found = [
        (f"{path}.{name}".lstrip("."), block)
        for path, modules in network.named_modules()
        if isinstance(modules, nn.ModuleList)
        for name, block in modules.named_children()
    ]
    compiled = tuple(f"{path}." for path, module in network.named_modules() if is_compiled(module))
    return [(path, block) for path, block in found if not f"{path}.".startswith(compiled)]


def _beat_hook(beat: Callable[[str], object], where: str) -> Callable[..., None]:
    def hook(module: nn.Module, inputs: Any) -> None:
        beat(where)

    return hook
