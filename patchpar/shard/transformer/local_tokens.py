"""A tensor that a model takes for one with all tokens, while this rank has its own tokens of it only.

x.shape, x.dtype            those of the whole tensor: nothing is gathered
norm(x), linear(x), x + y   computed for each token alone: our tokens of the result
x.mean(1), x[0], x += y     any other function: all tokens are gathered, once, then torch's function runs

So the last layers of a model run on our tokens, and the prediction is gathered rather than what it is made of.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from patchpar.comm.pytree import map_leaves
from patchpar.shard.transformer.token_runs import Runs, TokenRun, cut_runs

Function = Callable[..., Any]
Rule = Callable[[Function, tuple[Any, ...], dict[str, Any]], Any]


class TokenSource(NamedTuple):
    """The block `where` that made local tokens: the runs they are of, and the function that gathers those of all ranks.

    All runs are along one dim, `dim`.
    """

    runs: Runs
    where: str
    gather: Callable[[Tensor, "TokenSource"], Tensor]

    @property
    def dim(self) -> int:
        """The dim of the tokens."""
        return self.runs[0].rows.dim


class LocalTokens(Tensor):
    """This rank's tokens `own` of a tensor of any shape. Made by `local_tokens` only."""

    own: Tensor
    source: TokenSource
    gathered: Tensor | None = None

    def whole(self) -> Tensor:
        """Return the tensor, of any shape, with the tokens of all ranks, gathered once.

        Raises UnsupportedModel, ExchangeError.
        """
        if self.gathered is None:
            self.gathered = self.source.gather(self.own, self.source)
        return self.gathered

    def with_own(self, own: Tensor) -> Tensor:
        """Return `own`, of any shape with as many dims, as local tokens like these.

        It was computed from each of our tokens alone.
        """
        return self if own is self.own else local_tokens(own, self.source)

    @classmethod
    def __torch_function__(
        cls, func: Function, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Called by torch instead of every function that has local tokens among its arguments."""
        kwargs, rule = kwargs or {}, RULES.get(func)
        found = NotImplemented if rule is None else rule(func, args, kwargs)
        return func(*all_whole(args), **all_whole(kwargs)) if found is NotImplemented else found


def local_tokens(own: Tensor, source: TokenSource) -> LocalTokens:
    """Return our tokens `own` of a tensor of any shape as `LocalTokens`."""
    found = own.as_subclass(LocalTokens)
    found.own, found.source = own, source
    return found


def all_whole(value: Any) -> Any:
    """Return `value` with every tensor in it whole. Raises UnsupportedModel, ExchangeError."""
    return map_leaves(lambda leaf: leaf.whole() if isinstance(leaf, LocalTokens) else leaf, value)


def _is_local(x: Any) -> bool:
    return isinstance(x, LocalTokens) and x.gathered is None


def _metadata(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What is the same for our tokens as for all."""
    return func(args[0].own) if len(args) == 1 and not kwargs and _is_local(args[0]) else NotImplemented


def _shape(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x = args[0]
    if not _is_local(x):
        return NotImplemented
    shape = list(x.own.shape)
    for rows, ranges in x.source.runs:
        shape[rows.dim] += ranges.num_tokens - ranges.count
    return torch.Size(shape) if func == SHAPE else func(torch.empty(shape, device="meta"), *args[1:], **kwargs)


def _of_each_element(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A function of each element of one tensor."""
    others = (*args[1:], *kwargs.values())
    if not args or not _is_local(args[0]) or any(isinstance(each, Tensor) for each in others):
        return NotImplemented
    if kwargs.get("training") or kwargs.get("inplace"):
        return NotImplemented
    own = func(args[0].own, *args[1:], **kwargs)
    return args[0].with_own(own) if isinstance(own, Tensor) else own  # the name of a dtype


def _with_dtype(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A copy of the first tensor in a dtype, which a second one may tell."""
    if kwargs or len(args) != 2 or not _is_local(args[0]):
        return _of_each_element(func, args, kwargs)
    return args[0].with_own(func(args[0].own, args[1].own if isinstance(args[1], LocalTokens) else args[1]))


def _of_each_row(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A linear layer or a norm over the last dims, which are not those of the tokens."""
    if not args or not _is_local(args[0]) or len(args) + len(kwargs) < 2:
        return NotImplemented
    x: LocalTokens = args[0]
    dims = 1
    if func is not F.linear:
        shape = args[1] if len(args) > 1 else kwargs.get("normalized_shape", ())
        dims = 1 if isinstance(shape, int) else len(shape)
    rest = (*args[1:], *kwargs.values())
    if not 0 < dims < x.own.ndim - x.source.dim or any(isinstance(each, LocalTokens) for each in rest):
        return NotImplemented
    return x.with_own(func(x.own, *args[1:], **kwargs))


def _of_both(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A function of the elements of two tensors that are broadcast; of a whole one our tokens are taken."""
    if len(args) != 2 or kwargs.keys() - {"alpha"}:
        return NotImplemented
    local = next((x for x in args if _is_local(x)), None)
    if local is None:
        return NotImplemented
    own = [_beside(local, x) for x in args]
    return NotImplemented if any(x is None for x in own) else local.with_own(func(*own, **kwargs))


def _beside(local: LocalTokens, x: Any) -> Any:
    """Return our part of an operand: a number, a tensor that is broadcast, or one with tokens. None if it has none."""
    source, dims = local.source, local.own.ndim
    if not isinstance(x, Tensor):
        return x
    if isinstance(x, LocalTokens):
        alike = x.gathered is None and x.own.ndim == dims and _size(x) == _size(local)
        return x.own if alike and x.source.runs == source.runs else None
    if x.ndim > dims:
        return None
    dim = source.dim - dims + x.ndim
    if dim < 0 or x.shape[dim] == 1:
        return x
    return cut_runs(x, tuple(TokenRun(replace(rows, dim=dim), ranges) for rows, ranges in source.runs))


def _size(x: LocalTokens) -> int:
    return x.own.shape[x.source.dim]


_METHODS = (
    *("float", "half", "bfloat16", "double", "type", "contiguous", "clone", "neg", "__neg__", "abs"),
    *("square", "pow", "sqrt", "rsqrt", "exp", "tanh", "sigmoid", "relu", "clamp"),
)
_FUNCTIONS = ("clone", "neg", "abs", "square", "pow", "sqrt", "rsqrt", "exp", "tanh", "sigmoid", "relu", "clamp")
_OPERATORS = ("add", "sub", "mul", "div", "true_divide")
_SYMBOLS = ("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv")

SHAPE = Tensor.shape.__get__  # type: ignore[attr-defined]

RULES: dict[Any, Rule] = {
    **{getattr(Tensor, name).__get__: _metadata for name in ("dtype", "device", "ndim", "layout", "is_cuda", "is_cpu")},
    **{getattr(Tensor, name).__get__: _metadata for name in ("requires_grad", "is_meta", "is_sparse", "is_quantized")},
    **{getattr(Tensor, name): _metadata for name in ("dim", "ndimension", "is_floating_point", "is_complex")},
    **{getattr(Tensor, name): _metadata for name in ("element_size", "get_device", "is_inference")},
    **dict.fromkeys((SHAPE, Tensor.size, Tensor.__len__, Tensor.numel, Tensor.nelement), _shape),
    **{getattr(Tensor, name): _of_each_element for name in _METHODS},
    **dict.fromkeys((Tensor.to, Tensor.type_as), _with_dtype),
    **{getattr(torch, name): _of_each_element for name in _FUNCTIONS},
    **dict.fromkeys((F.silu, F.gelu, F.relu, F.dropout, F.mish, F.softplus), _of_each_element),
    **dict.fromkeys((F.linear, F.layer_norm, F.rms_norm), _of_each_row),
    **{getattr(kind, name): _of_both for kind in (Tensor, torch) for name in _OPERATORS},
    **{getattr(Tensor, f"__{name}__"): _of_both for name in _SYMBOLS},
}
