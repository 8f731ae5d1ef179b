"""A tensor whose values have not arrived yet: its first use waits for them, and it behaves as any tensor otherwise.

p = AsyncMessage(specs, device, fetch).tensors[0]
p.shape, p.dtype           known: no wait
p[:, :64], p.float()       a part or a copy in another dtype: an AsyncTensor as well, no wait
p - q                      waits, then computes on plain tensors
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from patchpar.comm.pytree import leaves, map_leaves, map_tensors

# Names of torch's functions and methods: those that read no values, those that return views, those that copy.
_METADATA = {"size", "dim", "ndimension", "numel", "nelement", "__len__", "stride", "element_size", "get_device"}
_METADATA |= {"storage_offset", "is_contiguous", "is_floating_point", "is_complex", "is_inference"}
_VIEWS = {"__get__", "__getitem__", "chunk", "split", "unbind", "narrow", "select", "unsqueeze", "squeeze", "expand"}
_VIEWS |= {"view", "view_as", "reshape", "flatten", "unflatten", "permute", "transpose", "movedim", "swapaxes"}
_VIEWS |= {"detach", "contiguous"}
_COPIES = {"float", "half", "bfloat16", "double", "to", "type", "clone"}


class AsyncMessage:
    """The tensors of one message. `fetch` blocks until the message has arrived and returns their values.

    `own_parts`: this rank's part [b, ...] of each, where the tensors are whole batches [B, ...].
    `part_shapes`: for each tensor the shapes of the parts of all ranks, where these differ.
    """

    def __init__(
        self,
        specs: Sequence[tuple[tuple[int, ...], torch.dtype]],
        device: torch.device,
        fetch: Callable[[], Sequence[Tensor]],
        own_parts: Sequence[Tensor] = (),
        part_shapes: Sequence[Sequence[tuple[int, ...]]] = (),
    ) -> None:
        self._fetch: Callable[[], Sequence[Tensor]] | None = fetch
        self._buffers = [_void(shape, dtype, device) for shape, dtype in specs]
        self._later: list[Callable[[], object]] = []
        self._own_parts, self._part_shapes = list(own_parts), list(part_shapes)

    @property
    def tensors(self) -> list[Tensor]:
        """New AsyncTensors of any shape, one for each spec. Not kept here: dropping them frees their memory."""
        return [AsyncTensor.on(buffer, self, index) for index, buffer in enumerate(self._buffers)]

    @property
    def pending(self) -> bool:
        """Whether the values have not been fetched yet."""
        return self._fetch is not None

    def wait(self) -> None:
        """Fetch the values. Idempotent. An exception of `fetch` is raised again at every further use."""
        if self._fetch is None:
            return
        for buffer, value in zip(self._buffers, self._fetch(), strict=True):
            buffer.copy_(value)
        for fill in self._later:
            fill()
        self._fetch = None
        self._later.clear()

    def own_part(self, index: int | None) -> Tensor | None:
        """Return this rank's part [b, ...] of tensor `index` [B, ...]; None once fetched, since it may have changed."""
        return self._own_parts[index] if self.pending and self._own_parts and index is not None else None

    def part_shapes(self, index: int | None) -> Sequence[tuple[int, ...]] | None:
        """Return the shapes of all ranks' parts of tensor `index`, where they differ."""
        return self._part_shapes[index] if self._part_shapes and index is not None else None

    def copied(self, copy: Callable[[], Tensor]) -> Tensor:
        """Return an AsyncTensor of any shape for the result of `copy`, which runs again when the values arrive."""
        result = copy()
        self._later.append(lambda: result.copy_(copy()))
        return AsyncTensor.on(result, self)


def _void(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a buffer of NaN, or of zeros for integers, so that a use without a wait cannot pass for a result."""
    return torch.full(shape, torch.nan if dtype.is_floating_point else 0, dtype=dtype, device=device)


class AsyncTensor(Tensor):
    """A tensor of any shape whose values a message will bring. Made by `AsyncMessage` only."""

    _message: AsyncMessage
    _index: int | None

    @classmethod
    def on(cls, buffer: Tensor, message: AsyncMessage, index: int | None = None) -> "AsyncTensor":
        """Return `buffer`, of any shape, as an AsyncTensor: tensor `index` of `message`, or a part or copy of one."""
        async_tensor = buffer.as_subclass(cls)
        async_tensor._message, async_tensor._index = message, index
        return async_tensor

    @property
    def pending(self) -> bool:
        """Whether its values have not arrived yet."""
        return self._message.pending

    @property
    def own_part(self) -> Tensor | None:
        """This rank's part [b, ...] of a whole [B, ...]; see `AsyncMessage.own_part`."""
        return self._message.own_part(self._index)

    @property
    def part_shapes(self) -> Sequence[tuple[int, ...]] | None:
        """See `AsyncMessage.part_shapes`."""
        return self._message.part_shapes(self._index)

    def with_values(self, values: Tensor) -> Tensor:
        """Return `values`, of the same shape as this, as a tensor of the same message that needs no wait."""
        return AsyncTensor.on(values, self._message, self._index)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        """Called by torch instead of every operation that has an AsyncTensor among its arguments."""
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        first = args[0] if args and isinstance(args[0], AsyncTensor) else None
        plain_args, plain_kwargs = map_leaves(_plain, args), map_leaves(_plain, kwargs)

        def run() -> Any:
            return func(*plain_args, **plain_kwargs)

        if first is not None and first._message.pending and not _async_tensors_in((args[1:], kwargs)):
            if name in _METADATA:
                return run()
            if name in _VIEWS or name in _COPIES:
                result = run()
                if _are_views(result, plain_args[0]):
                    return map_tensors(lambda x: AsyncTensor.on(x, first._message), result)
                if name in _COPIES and isinstance(result, Tensor):
                    return first._message.copied(run)
        for async_tensor in _async_tensors_in((args, kwargs)):
            async_tensor._message.wait()
        return run()


def _async_tensors_in(tree: Any) -> list[AsyncTensor]:
    return [leaf for leaf in leaves(tree) if isinstance(leaf, AsyncTensor)]


def _plain(x: Any) -> Any:
    if not isinstance(x, AsyncTensor):
        return x
    with torch._C.DisableTorchFunctionSubclass():
        return x.as_subclass(Tensor)


def _are_views(result: Any, whole: Tensor) -> bool:
    """Whether all tensors of `result` are views of `whole`; true where `result` has no tensor."""
    address = whole.untyped_storage().data_ptr()
    return all(x.untyped_storage().data_ptr() == address for x in leaves(result) if isinstance(x, Tensor))
