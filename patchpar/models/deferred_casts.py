"""Casts to another dtype while a model is loaded: noted, and made later, for the part of the weights that a rank keeps.

    from_pretrained      weight of the file, mapped  ->  to(float16): memory that nobody has written to takes none
    copy(x, a, b, into)  bytes a to b of the cast weight, for a shard
    finish()             all other casts, such as those of weights outside blocks

diffusers and transformers decide which weights are cast, and to what. What any other operator reads is cast before it.
"""

import importlib
import weakref
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from patchpar.launch.file_pages import FilePages
from patchpar.models.dry_run.result_form import tensors_of
from patchpar.shard.hooks import HookSet
from patchpar.shard.weights.packed import HOST, copy_memory, memory_of

LEAST_BYTES = 2**14  # of a weight: smaller ones are cast at once
LOADS_IN_THREADS = "transformers.core_model_loading"  # since transformers 5; a mode is one of its thread only


@dataclass(frozen=True, slots=True)
class DeferredCast:
    """A cast of `source`, contiguous and of any shape, into a storage that nobody has written to, while it is alive."""

    source: Tensor
    dtype: torch.dtype
    storage: "weakref.ref[torch.UntypedStorage]"

    def make(self) -> None:
        """Write all values."""
        storage = self.storage()
        if storage is not None:
            whole = torch.empty(0, dtype=self.dtype).set_(storage)
            whole[: self.source.numel()].view(self.source.shape).copy_(self.source)


class DeferredCasts:
    """The casts of one model, noted within `loading`; `finish` ends it."""

    def __init__(self) -> None:
        self._casts: dict[int, DeferredCast] = {}  # by the address of the storage
        self._into: dict[int, list[int]] = {}  # the addresses of casts by that of their source
        self._pages: FilePages | None = None

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Context in which casts of weights in host memory are noted and not made."""
        with HookSet() as hooks, _CastMode(self):
            loader: Any = _module_or_none(LOADS_IN_THREADS)
            if hasattr(loader, "ThreadPoolExecutor"):
                pool = partial(ThreadPoolExecutor, initializer=self._enter)
                hooks.replace(loader, "ThreadPoolExecutor", pool)
            yield

    def _enter(self) -> None:
        """Note the casts of the current thread, until it ends."""
        mode: Any = _CastMode(self)
        mode.__enter__()

    def defer(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Return a tensor for `x`, contiguous and of any shape, in another dtype, whose values are missing."""
        made = torch.empty(x.shape, dtype=dtype)
        storage = made.untyped_storage()
        address = storage.data_ptr()
        self._casts[address] = DeferredCast(x.detach(), dtype, weakref.ref(storage))
        self._into.setdefault(x.untyped_storage().data_ptr(), []).append(address)
        return made

    def make_for(self, tensors: Iterable[Tensor], *, written: bool) -> None:
        """Make the casts into these tensors of any shape, and if they are `written` to also those of them."""
        for address in filter(None, map(_address, tensors)) if self._casts else ():
            for missing in (address, *(self._into.pop(address, ()) if written else ())):
                if missing in self._casts:
                    self._casts.pop(missing).make()

    def copy(self, x: Tensor, first: int, last: int, into: Tensor) -> None:
        """Copy bytes of the memory of `x`, of any shape, to `into` [last - first], once: file pages are released."""
        if self._pages is None:
            self._pages = FilePages()
        if x.device != HOST:
            copy_memory(x, first, last, into)
            return
        address = _address(x)
        cast = None if address is None else self._casts.get(address)
        if address is None or cast is None or cast.storage() is None:
            part = memory_of(x, first, last)
            into.copy_(part)
        else:
            size, begin = cast.dtype.itemsize, x.data_ptr() - address
            part = cast.source.view(-1)[(begin + first) // size : (begin + last) // size]
            into.view(cast.dtype).copy_(part)
        self._pages.release(part.data_ptr(), part.numel() * part.element_size())

    def finish(self) -> None:
        """Make all casts whose result is still used."""
        while self._casts:
            self._casts.popitem()[1].make()


class _CastMode(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's base is not typed
    """Notes the casts of one thread in `casts`."""

    def __init__(self, casts: DeferredCasts) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._into = casts

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Asked by torch, which else wraps each operator: nothing is compiled inside."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.is_view:
            return func(*args, **kwargs)
        self._into.make_for(tensors_of((*args, *kwargs.values())), written=func._schema.is_mutable)
        if func is torch.ops.aten._to_copy.default and _is_large_cast(args[0], kwargs):
            return self._into.defer(args[0], kwargs["dtype"])
        return func(*args, **kwargs)


def _is_large_cast(x: Tensor, kwargs: dict[str, Any]) -> bool:
    """Whether `x`, of any shape, is a large weight in host memory that stays there in another floating-point dtype."""
    dtype, device = kwargs.get("dtype"), kwargs.get("device")
    return (
        dtype is not None
        and type(x) is Tensor
        and x.device == HOST
        and device in (None, HOST)
        and x.is_floating_point()
        and dtype.is_floating_point
        and x.is_contiguous()
        and kwargs.get("memory_format") in (None, torch.preserve_format, torch.contiguous_format)
        and x.numel() * x.element_size() >= LEAST_BYTES
    )


def _address(x: Tensor) -> int | None:
    """Return the address of the storage of `x`, of any shape, in host memory; None for any other tensor."""
    is_plain = type(x) in (Tensor, nn.Parameter) and x.device == HOST and x.layout is torch.strided
    return x.untyped_storage().data_ptr() if is_plain else None


def _module_or_none(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        return None
