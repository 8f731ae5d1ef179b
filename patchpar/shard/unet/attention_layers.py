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
    handles: list[Any] = []
    for path, module in denoiser.named_modules():
        if not hasattr(module, "processor"):
            continue
        handles.append(module.register_forward_pre_hook(_begin(seen, path), with_kwargs=True))
        handles.append(module.register_forward_hook(_end(seen)))
        if isinstance(getattr(module, "to_k", None), nn.Module):
            handles.append(module.to_k.register_forward_pre_hook(_made_keys(seen, path)))
    try:
        with SdpaMode(seen.attended):
            yield
    finally:
        for handle in handles:
            handle.remove()


def _begin(seen: ObservedAttention, path: str) -> Callable[..., None]:
    def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
        seen.under_way.append(path)
        hidden = args[0] if args else kwargs["hidden_states"]
        context = args[1] if len(args) > 1 else kwargs.get("encoder_hidden_states")
        if context is None or context is hidden:
            seen.own[path] = tuple(hidden.shape)

    return hook


def _end(seen: ObservedAttention) -> Callable[..., None]:
    def hook(module: nn.Module, args: Any, output: Any) -> None:
        seen.under_way.pop()

    return hook


def _made_keys(seen: ObservedAttention, path: str) -> Callable[..., None]:
    def hook(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        if seen.under_way[-1:] == [path]:
            seen.keys[path] = tuple(args[0].shape)

    return hook
