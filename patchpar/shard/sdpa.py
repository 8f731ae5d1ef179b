"""torch's scaled_dot_product_attention: the arguments of a call, and two ways to replace it in this thread.

AttentionReplaced      the function in torch.nn.functional, as models call it: costs nothing at other functions
SdpaMode               a mode, which sees every function: for models that have imported the function itself
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack, handle_torch_function

from patchpar.shard.precision import autocast_dtype
from patchpar.shard.torch_replacement import TorchReplacement

T = TypeVar("T")
TORCHS: Callable[..., Tensor] = torch._C._nn.scaled_dot_product_attention


class AttentionCall(NamedTuple):
    """The arguments of scaled_dot_product_attention in torch's order, and what computes it.

    `query` [B, N, q, D], `key` [B, M, k, D], `value` [B, M, k, E], or each without a head dim; `attn_mask` broadcasts
    to [B, N, q, k]. `kernel`: the user's own, for calls with heads; None is torch's function.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False
    kernel: Callable[..., Tensor] | None = None

    def run(self) -> Tensor:
        """Return the output [B, N, q, E], or [B, q, E] of a call without heads."""
        attend = TORCHS if self.kernel is None or self.query.ndim != 4 else self.kernel
        return attend(
            self.query,
            self.key,
            self.value,
            attn_mask=self.attn_mask,
            dropout_p=self.dropout_p,
            is_causal=self.is_causal,
            scale=self.scale,
            enable_gqa=self.enable_gqa,
        )

    def attend_to(self, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        """Return the output [B, N, q, E] to other keys [B, M, k, D] and values [B, M, k, E], of a call with heads.

        As another call does, which would have to be made first, in every layer of every step.
        """
        query, _, _, _, dropout_p, is_causal, scale, _, kernel = self
        attend = TORCHS if kernel is None else kernel
        gqa = query.shape[1] != key.shape[1]
        return attend(
            query, key, value, attn_mask=mask, dropout_p=dropout_p, is_causal=is_causal, scale=scale, enable_gqa=gqa
        )

    def with_heads(self) -> "AttentionCall":
        """Return the call of tensors [B, L, D] with a dim for one head. It remains a call of torch's function."""
        mask = self.attn_mask
        query, key, value = (x.unsqueeze(1) for x in (self.query, self.key, self.value))
        mask = mask.unsqueeze(1) if mask is not None and mask.ndim == 3 else mask
        return self._replace(query=query, key=key, value=value, attn_mask=mask, kernel=None)

    def in_one_dtype(self) -> "AttentionCall":
        """Return the call as torch.autocast gives it to torch's function, where its tensors differ in dtype."""
        query, mask, dtype = self.query, self.attn_mask, autocast_dtype(self.query.device.type)
        if dtype is None:
            return self
        if mask is not None and mask.is_floating_point():
            mask = mask.to(dtype)
        return self._replace(query=query.to(dtype), key=self.key.to(dtype), value=self.value.to(dtype), attn_mask=mask)


Attend = Callable[[AttentionCall], Tensor]
_ATTEND: ContextVar[Attend | None] = ContextVar("patchpar_attend", default=None)
_IS_REPLACED: ContextVar[bool] = ContextVar("patchpar_is_replaced", default=False)


@contextmanager
def answered_by(attend: Attend | None) -> Iterator[None]:
    """Context in which `attend` replaces attention in this thread where that is dispatched; None: nothing does."""
    token = _ATTEND.set(attend)
    try:
        yield
    finally:
        _ATTEND.reset(token)


def answer(call: AttentionCall) -> Tensor:
    """Return the output [B, N, q, E] by this thread's replacement, or torch's without one."""
    attend = _ATTEND.get()
    if attend is None:
        return call.run()
    token = _ATTEND.set(None)  # the replacement may call attention itself
    try:
        return attend(call)
    finally:
        _ATTEND.reset(token)


def dispatch_attention(*args: Any, **kwargs: Any) -> Tensor:
    """Stand in torch.nn.functional: call this thread's replacement, if it has one.

    Function modes of other packages are asked first, once, as for a function of torch. One that is to see what runs
    inside enters itself and calls `replaced_attention`.
    """
    if torch.compiler.is_dynamo_compiling():
        return TORCHS(*args, **kwargs)
    if torch._C._len_torch_function_stack() and _is_of_others():
        return handle_torch_function(dispatch_attention, (), *args, **kwargs)  # which calls this again, if at all
    return replaced_attention(*args, **kwargs)


def replaced_attention(*args: Any, **kwargs: Any) -> Tensor:
    """Return the output [B, N, q, E] by this thread's replacement, or by what was in torch.nn.functional before."""
    attend = _ATTEND.get()
    if attend is None:
        return _REPLACEMENT.before(*args, **kwargs)
    token = _ATTEND.set(None)
    try:
        call = AttentionCall(*args, **kwargs)
        if not call.query.dtype == call.key.dtype == call.value.dtype:  # without a call, in every attention
            call = call.in_one_dtype()
        return attend(call)
    finally:
        _ATTEND.reset(token)


def _is_of_others() -> bool:
    """Whether the innermost mode is of another package: diffusers' compares with what is in torch.nn.functional."""
    mode = _get_current_function_mode_stack()[-1]  # type: ignore[no-untyped-call]
    return not type(mode).__module__.startswith("patchpar.")


_REPLACEMENT = TorchReplacement(F, "scaled_dot_product_attention", dispatch_attention)


def beneath(function: Any) -> Any:
    """Return what a function of torch.nn.functional is without a replacement by this or another thread."""
    return _REPLACEMENT.before if function is dispatch_attention else function


class AttentionDispatched:
    """Context in which torch.nn.functional.scaled_dot_product_attention may be replaced in this thread at little cost.

    For many calls of `with_attention`, such as those of all layers of a denoiser. Alone it replaces nothing.
    """

    def __enter__(self) -> None:
        _REPLACEMENT.add_user()
        self._token = _IS_REPLACED.set(True)

    def __exit__(self, *exception: object) -> None:
        _IS_REPLACED.reset(self._token)
        _REPLACEMENT.remove_user()


class AttentionReplaced:
    """Context in which `attend` replaces torch.nn.functional.scaled_dot_product_attention in this thread.

    It is dispatched to this thread's replacement meanwhile. Code under torch.compile is not affected.
    """

    def __init__(self, attend: Attend) -> None:
        self._attend, self._dispatched = attend, AttentionDispatched()

    def __enter__(self) -> None:
        self._dispatched.__enter__()
        self._token = _ATTEND.set(self._attend)

    def __exit__(self, *exception: object) -> None:
        _ATTEND.reset(self._token)
        self._dispatched.__exit__(*exception)


def with_attention(attend: Attend, forward: Callable[..., T], args: Iterable[Any], kwargs: Mapping[str, Any]) -> T:
    """Return the result of `forward`, in which `attend` replaces torch's function as in `AttentionReplaced`.

    For every layer of every step: a context manager costs twice as much, and most of it is done once in
    `AttentionDispatched`.
    """
    if not _IS_REPLACED.get():
        with AttentionReplaced(attend):
            return forward(*args, **kwargs)
    token = _ATTEND.set(attend)
    try:
        return forward(*args, **kwargs)
    finally:
        _ATTEND.reset(token)


@contextmanager
def torchs_attention() -> Iterator[None]:
    """Context in which torch.nn.functional has the function of before again, as far as this thread is concerned.

    torch.compile reads its list of functions there once: it would take a replacement for torch's.
    """
    if not _IS_REPLACED.get():
        yield
        return
    token = _IS_REPLACED.set(False)
    _REPLACEMENT.remove_user()
    try:
        yield
    finally:
        _REPLACEMENT.add_user()
        _IS_REPLACED.reset(token)


class SdpaMode(TorchFunctionMode):
    """Mode in which `attend`, which returns [B, N, q, E], replaces calls of attention in this thread.

    `others(func, args, kwargs)` replaces other torch functions, those `named` or all; without it they run unchanged.
    """

    def __init__(
        self,
        attend: Callable[[AttentionCall], Tensor],
        others: Callable[[Callable[..., Any], Sequence[Any], dict[str, Any]], Any] | None = None,
        named: frozenset[Callable[..., Any]] | None = None,
    ) -> None:
        super().__init__()
        self._attend, self._others, self._named = attend, others, named

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func is TORCHS:
            call = AttentionCall(*args, **(kwargs or {}))
            same = call.query.dtype == call.key.dtype == call.value.dtype
            return self._attend(call if same else call.in_one_dtype())
        if self._others is not None and (self._named is None or func in self._named):
            return self._others(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


def as_torch_lays(out_BNlD: Tensor) -> Tensor:
    """Return [B, N, l, D] in the memory layout of torch's attention, which models may rely on.

    The heads of a token are contiguous, so that `view` can make [B, l, N * D] of its transpose.
    """
    if out_BNlD.ndim != 4:
        return out_BNlD
    _, heads, tokens, width = out_BNlD.shape
    if out_BNlD.stride() == (tokens * heads * width, width, heads * width, 1):
        return out_BNlD  # nearly always
    out_BlND = out_BNlD.transpose(1, 2)
    return out_BNlD if out_BlND.is_contiguous() else out_BlND.contiguous().transpose(1, 2)
