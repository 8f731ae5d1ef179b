"""Find the attention layers over tokens of the whole image, by the inputs of their keys in a run of the denoiser.

A layer's keys come from `to_k`. Where its input has more tokens for a taller image, in as many samples, the keys are
the image's. Text has the same tokens for every image; in layers over frames the samples grow, not the tokens. Where
keys come from another module (fused projections), a layer without another context attends to its own tokens.

These layers are diffusers', which have a processor. In networks of other libraries the layer is the innermost module
that calls torch's attention, and its keys are those of the call.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor, nn

from patchpar.shard.hooks import HookSet
from patchpar.shard.sdpa import AttentionCall, AttentionReplaced, SdpaMode

TOKEN_LAYERS = (nn.Linear, nn.LayerNorm, nn.Embedding)  # they take each token alone


@dataclass(slots=True)
class ObservedAttention:
    """Observations of one run by module path: input shapes of keys, and layers that call torch's attention.

    `elsewhere`: those that call it by another name than that in torch.nn.functional. `calls`: the running layer of each
    call, in their order. `asked`: keys [B, L, channels] of calls in modules without a processor.
    """

    keys: dict[str, tuple[int, ...]] = field(default_factory=dict)
    own: dict[str, tuple[int, ...]] = field(default_factory=dict)  # hidden states of layers without another context
    with_kernel: set[str] = field(default_factory=set)
    elsewhere: set[str] = field(default_factory=set)
    calls: list[str] = field(default_factory=list)
    under_way: list[str] = field(default_factory=list)
    running: list[str] = field(default_factory=list)  # modules without a processor
    asked: dict[str, list[tuple[int, ...]]] = field(default_factory=dict)
    _by_name: bool = False

    def shape(self, path: str) -> tuple[int, ...] | None:
        """Return the shape of the input of a layer's keys."""
        if path in self.asked:
            return self.asked[path][0]
        return self.keys.get(path, self.own.get(path))

    def enter(self, path: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Begin the forward of the layer at `path`."""
        self.under_way.append(path)
        hidden = args[0] if args else kwargs["hidden_states"]
        context = args[1] if len(args) > 1 else kwargs.get("encoder_hidden_states")
        if context is None or context is hidden:
            self.own[path] = tuple(hidden.shape)

    def made_keys(self, path: str, module: nn.Module, args: tuple[Tensor, ...]) -> None:
        """Note the input [B, L, C] of a layer's keys."""
        if self.under_way[-1:] == [path]:
            self.keys[path] = tuple(args[0].shape)

    def leave(self) -> None:
        """End the forward of the innermost layer."""
        self.under_way.pop()

    def begin_module(self, path: str, module: nn.Module, args: Any) -> None:
        """Begin the forward of a module without a processor."""
        self.running.append(path)

    def end_module(self) -> None:
        """End the forward of the innermost of them."""
        self.running.pop()

    def attended(self, call: AttentionCall) -> Tensor:
        """Note the running layer for a call of torch's attention, and return its output [B, N, q, E]."""
        layer = self.under_way[-1:] or self.running[-1:]
        if layer and not self.under_way:
            key = call.key if call.key.ndim == 4 else call.key.unsqueeze(1)
            self.asked.setdefault(layer[0], []).append((key.shape[0], key.shape[2], key.shape[1] * key.shape[3]))
        self.with_kernel.update(layer)
        self.calls += layer
        if not self._by_name:
            self.elsewhere.update(layer)
        self._by_name = False
        return call.run()

    def called_by_name(self, call: AttentionCall) -> Tensor:
        """Note that the name in torch.nn.functional was called, and return the output [B, N, q, E].

        torch's function is called next, see `attended`.
        """
        self._by_name = True
        return call.run()

    def paths(self) -> Iterator[str]:
        """Yield the observed layers in the order of execution."""
        yield from dict.fromkeys((*self.keys, *self.own, *self.asked))


@contextmanager
def attention_watched(denoiser: nn.Module, seen: ObservedAttention) -> Iterator[None]:
    """Context with torch forward hooks on every attention layer."""
    with HookSet() as hooks, SdpaMode(seen.attended), AttentionReplaced(seen.called_by_name):
        for path, module in denoiser.named_modules():
            if not hasattr(module, "processor"):
                if path and not isinstance(module, TOKEN_LAYERS):
                    hooks.before(module, partial(seen.begin_module, path))
                    hooks.after(module, lambda *_: seen.end_module())
                continue
            hooks.before(module, partial(seen.enter, path), with_kwargs=True)
            hooks.after(module, lambda *_: seen.leave())
            if isinstance(getattr(module, "to_k", None), nn.Module):
                hooks.before(module.to_k, partial(seen.made_keys, path))
        yield
