"""Find the modules whose forwards call torch.fft, in a run of the denoiser."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from patchpar.shard.hooks import HookSet

TRANSFORMS = frozenset(
    getattr(torch.fft, f"{kind}{name}") for kind in ("", "i", "r", "ir") for name in ("fft", "fft2", "fftn")
)


class TransformsMode(TorchFunctionMode):
    """Notes the modules that call torch.fft: the innermost of those entered, or "" outside of all."""

    def __init__(self) -> None:
        super().__init__()
        self._inside = [""]
        self.found: dict[str, None] = {}

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func in TRANSFORMS:
            self.found[self._inside[-1]] = None
        return func(*args, **(kwargs or {}))

    def enter(self, path: str, *_: Any) -> None:
        """Begin the forward of the module at `path`."""
        self._inside.append(path)

    def leave(self, *_: Any) -> None:
        """End the innermost forward."""
        self._inside.pop()


def modules_with_transforms(denoiser: nn.Module, run: Callable[[], Any]) -> tuple[str, ...]:
    """Return the paths of the modules that call torch.fft in `run`, a call of the denoiser, by hooks on all modules."""
    with HookSet() as hooks, torch.no_grad(), TransformsMode() as seen:
        for path, module in denoiser.named_modules():
            hooks.before(module, partial(seen.enter, path))
            hooks.after(module, seen.leave)
        run()
    return tuple(path for path in seen.found if path)
