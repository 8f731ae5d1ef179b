"""Attention layers of diffusers call their processor without looking up its signature.

diffusers does so in every call of a layer, to find out which further arguments the processor takes: that takes longer
than all of an exchange. It does nothing else, and without such arguments there is nothing to find out.
"""

from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any, NamedTuple

from torch import nn


class _Way(NamedTuple):
    """How a layer's forward calls the processor, `call`, where its arguments are among those of these `names`."""

    call: Callable[..., Any]
    names: frozenset[str]


def _by_name(layer: Any, hidden_states: Any, encoder_hidden_states: Any = None, attention_mask: Any = None) -> Any:
    context = {"encoder_hidden_states": encoder_hidden_states, "attention_mask": attention_mask}
    return layer.processor(layer, hidden_states, **context)


def _in_order(
    layer: Any,
    hidden_states: Any,
    encoder_hidden_states: Any = None,
    attention_mask: Any = None,
    image_rotary_emb: Any = None,
) -> Any:
    return layer.processor(layer, hidden_states, encoder_hidden_states, attention_mask, image_rotary_emb)


def _without_context(layer: Any, hidden_states: Any, attention_mask: Any = None, image_rotary_emb: Any = None) -> Any:
    return layer.processor(layer, hidden_states, attention_mask, image_rotary_emb)


_ALONE = ("hidden_states", "attention_mask")
_BESIDE_CONTEXT = (*_ALONE, "encoder_hidden_states")
_FLUX, _FLUX_2 = (f"diffusers.models.transformers.transformer_{name}" for name in ("flux", "flux2"))
_WAYS: Mapping[tuple[str, str], _Way] = {
    ("diffusers.models.attention_processor", "Attention.forward"): _Way(_by_name, frozenset(_BESIDE_CONTEXT)),
    (_FLUX, "FluxAttention.forward"): _Way(_in_order, frozenset((*_BESIDE_CONTEXT, "image_rotary_emb"))),
    (_FLUX_2, "Flux2Attention.forward"): _Way(_in_order, frozenset((*_BESIDE_CONTEXT, "image_rotary_emb"))),
    (_FLUX_2, "Flux2ParallelSelfAttention.forward"): _Way(_without_context, frozenset((*_ALONE, "image_rotary_emb"))),
}
"""By module and name of the forward: the layers of UNets and of many transformers, those of FLUX and of FLUX.2."""


def _way_of(forward: Callable[..., Any]) -> _Way | None:
    function = getattr(forward, "__func__", None)
    if not isinstance(function, FunctionType):
        return None
    # A function that wraps diffusers' may have its name, but the globals of another module.
    return _WAYS.get((function.__globals__["__name__"], function.__qualname__))


def looks_up_signatures(layer: nn.Module) -> bool:
    """Whether a module's forward is one of diffusers' that look up the signature of their processor."""
    return _way_of(layer.forward) is not None


class ProcessorCall:
    """Calls the processor of an attention layer as its own forward does, where that is diffusers'."""

    def __init__(self) -> None:
        self._forward: Callable[..., Any] | None = None  # for which `_way` has been found
        self._way: _Way | None = None

    def run(self, layer: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what the layer's own `forward` returns.

        That runs itself where it is replaced by other code, or among `kwargs` are arguments of a processor.
        """
        if forward is not self._forward:
            self._forward, self._way = forward, _way_of(forward)
        way = self._way
        if way is None or not kwargs.keys() <= way.names:
            return forward(*args, **kwargs)
        return way.call(layer, *args, **kwargs)
