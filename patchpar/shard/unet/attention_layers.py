"""Which attention layers see the whole picture, watched while a denoiser runs: by what their keys are made of.

A layer's keys come from `to_k`. Where its input has more tokens in a taller picture, in as many samples, the keys are
the picture's. Text has the same tokens in every picture; of layers over frames the samples grow, not the tokens. Where
keys are made by another module (fused projections), a layer without any other context attends to its own tokens.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from patchpar.shard.hooks import HookSet
from patchpar.shard.sdpa import AttentionCall, SdpaMode


@dataclass(slots=True)
class ObservedAttention:
    """What one run showed, by module path: shapes of what the keys were made of, and who calls torch's attention."""

    keys: dict[str, tuple[int, ...]] = field(default_factory=dict)
    own: dict[str, tuple[int, ...]] = field(default_factory=dict)  # hidden states of layers without another context
    with_kernel: set[str] = field(default_factory=set)
    under_way: list[str] = field(default_factory=list)

    def shape(self, path: str) -> tuple[int, ...] | None:
        """What the keys of a layer were made of."""
        return self.keys.get(path, self.own.get(path))

    def leave(self) -> None:
        """The layer under way is done."""
        self.under_way.pop()

    def attended(self, call: AttentionCall) -> Tensor:
        """Answers a call of torch's attention: the layer under way makes it."""
        self.with_kernel.update(self.under_way[-1:])
        return call.run()

    def paths(self) -> Iterator[str]:
        """Layers that have been seen, in the order of execution."""
        yield from dict.fromkeys((*self.keys, *self.own))


@contextmanager
def attention_watched(denoiser: nn.Module, seen: ObservedAttention) -> Iterator[None]:
    """Torch forward hooks on every attention layer, for as long as the block runs."""
    with HookSet() as hooks, SdpaMode(seen.attended):
        for path, module in denoiser.named_modules():
            if not hasattr(module, "processor"):
                continue
            hooks.before(module, _begin(seen, path), with_kwargs=True)
            hooks.after(module, lambda *_: seen.leave())
            if isinstance(getattr(module, "to_k", None), nn.Module):
                hooks.before(module.to_k, _made_keys(seen, path))
        yield


def _begin(seen: ObservedAttention, path: str) -> Callable[..., None]:
    def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
        seen.under_way.append(path)
        hidden = args[0] if args else kwargs["hidden_states"]
        context = args[1] if len(args) > 1 else kwargs.get("encoder_hidden_states")
        if context is None or context is hidden:
            seen.own[path] = tuple(hidden.shape)

    return hook


def _made_keys(seen: ObservedAttention, path: str) -> Callable[..., None]:
    def hook(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        if seen.under_way[-1:] == [path]:
            seen.keys[path] = tuple(args[0].shape)

    return hook
