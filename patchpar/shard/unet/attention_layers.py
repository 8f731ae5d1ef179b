"""Which attention layers see the whole picture, watched while a denoiser runs: by what their keys are made of.

A layer's keys come from `to_k`. Where its input has more tokens in a taller picture, in as many samples, the keys are
the picture's. Text has the same tokens in every picture; of layers over frames the samples grow, not the tokens. Where
keys are made by another module (fused projections), a layer without any other context attends to its own tokens.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode


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
        with _KernelObserver(seen):
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


class _KernelObserver(TorchFunctionMode):
    def __init__(self, seen: ObservedAttention) -> None:
        super().__init__()
        self.seen = seen

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func is F.scaled_dot_product_attention and self.seen.under_way:
            self.seen.with_kernel.add(self.seen.under_way[-1])
        return func(*args, **(kwargs or {}))
