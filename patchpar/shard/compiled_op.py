"""Split attention as one custom operator: a compiled block stays one graph, and the exchange is not traced."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from patchpar.shard.sdpa import TORCHS, AttentionCall, answer, answered_by, torchs_attention

_TORCHS = torch.ops.aten.scaled_dot_product_attention.default._schema
SIGNATURE = str(_TORCHS).removeprefix(_TORCHS.name)


@torch.library.custom_op("patchpar::attend", mutates_args=(), schema=SIGNATURE)
def attend(*args: Any, **kwargs: Any) -> Tensor:
    """Return the attention output [..., q, E] of own queries [..., q, D] with the keys of all ranks."""
    return answer(AttentionCall(*args, **kwargs)).contiguous()


@attend.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *_: object, **__: object) -> Tensor:
    return query.new_empty(*query.shape[:-1], value.shape[-1])


@contextmanager
def attention_traced(attend: Callable[[AttentionCall], Tensor]) -> Iterator[None]:
    """Context around a compiled block: attention is one operator in its graph, answered by `attend`, [B, N, q, E]."""
    with torchs_attention(), answered_by(attend), _Tracing():
        yield


class _Tracing(TorchFunctionMode):
    """Replaces functions while a graph is traced. In the graph nothing is intercepted."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if torch.compiler.is_dynamo_compiling():
            func = _traceable(func)
        return func(*args, **(kwargs or {}))


def _traceable(func: Callable[..., Any]) -> Callable[..., Any]:
    """Return the replacement of a torch function in a compiled block."""
    if func is TORCHS:
        return attend
    if func is Tensor.unflatten:  # torch.compile cannot look through its call of super()
        return torch.unflatten
    return func


def compiled_forward(
    module: nn.Module, compiled: Callable[..., Any], forward: Callable[..., Any], /, *args: Any, **kwargs: Any
) -> Any:
    """Call the compiled block with its `forward` of before the hook."""
    hooked, module.forward = module.forward, forward
    try:
        return compiled(*args, **kwargs)
    finally:
        module.forward = hooked
