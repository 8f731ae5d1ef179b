"""A tensor whose values arrive band by band along one dim, and with it what is computed of each element alone.

    p = BandedTensor.of(empty, -2, (16, 16), fetch)      two bands of 16 rows
    p.shape, p.dtype                  known: nothing is fetched
    x + 0.1 * p, p.chunk(2)           banded as well: computed of each band when it is asked for
    p.band(0)                         fetches the first band only
    p.mean(), p += 1                  any other function: all bands are fetched, then torch's function runs

So the loop of a pipeline (guidance, a scheduler's step) goes on without a prediction, and the next denoiser call asks
for the band that it begins with.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from patchpar.comm.pytree import leaves, map_leaves, tensors_in

_METADATA = {"size", "dim", "ndimension", "numel", "nelement", "__len__", "stride", "element_size", "get_device"}
_METADATA |= {"is_contiguous", "is_floating_point", "is_complex", "is_inference"}
_ATTRIBUTES = ("shape", "dtype", "device", "ndim", "layout", "is_cuda", "is_cpu", "requires_grad", "is_meta", "grad_fn")
_GETTERS = {getattr(Tensor, name).__get__ for name in _ATTRIBUTES}
_OPERATORS = {"add", "sub", "mul", "div", "truediv", "pow"}
_OF_ELEMENTS = {*_OPERATORS, *(f"__{name}__" for name in _OPERATORS), *(f"__r{name}__" for name in _OPERATORS)}
_OF_ELEMENTS |= {"true_divide", "rsub", "neg", "__neg__", "abs", "sqrt", "rsqrt", "exp", "expm1", "log", "square"}
_OF_ELEMENTS |= {"sigmoid", "tanh", "sign", "reciprocal", "clamp", "where", "lerp", "addcmul", "maximum", "minimum"}
_OF_ELEMENTS |= {"to", "float", "half", "bfloat16", "double", "type", "type_as", "clone", "detach", "contiguous"}
_OF_ELEMENTS |= {"zeros_like", "ones_like"}
_BESIDE = {"chunk", "cat"}  # of several tensors, or with several results: along another dim these have all bands


class _Source:
    """Where bands come from: `fetch` returns one by its number. `dim` counts from the right."""

    def __init__(self, dim: int, sizes: Sequence[int], fetch: Callable[[int], Tensor]) -> None:
        self.dim, self.sizes = dim, tuple(sizes)
        self.starts = tuple(accumulate(self.sizes[:-1], initial=0))
        self.missing = set(range(len(self.sizes)))
        self.fetch: Callable[[int], Tensor] | None = fetch
        self.computed: list[ref[BandedTensor]] = []  # of these bands, when it is asked for

    def complete(self) -> None:
        """Compute all that is still to be computed of these bands, which are to change."""
        for found in self.computed:
            x = found()
            if x is not None:
                x.whole()
        self.computed.clear()

    def narrow(self, x: Tensor, band: int) -> Tensor:
        """Return a band of a whole tensor of any shape; of one that is broadcast along the dim all of it."""
        if x.ndim < -self.dim or x.shape[self.dim] == 1:
            return x
        return x.narrow(self.dim, self.starts[band], self.sizes[band])

    def cuts(self, x: Tensor) -> bool:
        """Whether a tensor, of any shape, has all bands along the dim."""
        return x.ndim >= -self.dim and x.shape[self.dim] == sum(self.sizes)

    def is_like(self, other: "_Source") -> bool:
        """Whether the bands are of the same rows."""
        return (self.dim, self.sizes) == (other.dim, other.sizes)


class BandedTensor(Tensor):
    """A tensor of any shape whose bands arrive one by one. Made by `of` only."""

    _source: _Source

    @classmethod
    def of(cls, buffer: Tensor, dim: int, sizes: Sequence[int], fetch: Callable[[int], Tensor]) -> "BandedTensor":
        """Return `buffer`, of any shape, as one whose bands of `sizes` along `dim` `fetch` returns by number.

        `dim` is negative. The bands are written to the buffer.
        """
        return cls._on(buffer, _Source(dim, sizes, fetch))

    @classmethod
    def _on(cls, buffer: Tensor, source: _Source) -> "BandedTensor":
        banded = buffer.as_subclass(cls)
        banded._source = source
        return banded

    def band(self, number: int) -> Tensor:
        """Return a band, of any shape, which is fetched once."""
        source, plain = self._source, _plain(self)
        if number in source.missing:
            assert source.fetch is not None
            source.narrow(plain, number).copy_(source.fetch(number))
            source.missing.discard(number)
            if not source.missing:
                source.fetch = None  # or every tensor of the loop would hold all before it
        return source.narrow(plain, number)

    def alone(self, number: int) -> Tensor:
        """Return a band, of any shape, as it is fetched: nothing is written to the memory of the tensor."""
        source = self._source
        if number in source.missing:
            assert source.fetch is not None
            return source.fetch(number)
        return source.narrow(_plain(self), number)

    def whole(self) -> Tensor:
        """Return the tensor, of any shape, with all bands."""
        for number in range(len(self._source.sizes)):
            self.band(number)
        return _plain(self)

    @property
    def buffer(self) -> Tensor:
        """The memory of the tensor, of any shape: bands that were not fetched are what `of` was given."""
        return _plain(self)

    @property
    def bands(self) -> tuple[int, tuple[int, ...]]:
        """The dim of the bands, from the right, and their sizes."""
        return self._source.dim, self._source.sizes

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        """Called by torch instead of every function that has a BandedTensor among its arguments."""
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        if name in _METADATA or func in _GETTERS:
            return func(*map_leaves(_plain, args), **map_leaves(_plain, kwargs))
        sources = [x._source for x in leaves((args, kwargs)) if isinstance(x, BandedTensor)]
        if _writes(name) or "out" in kwargs:
            for source in sources:
                source.complete()
        elif any(source.missing for source in sources):
            found = _by_bands(name, func, args, kwargs, sources)
            if found is not NotImplemented:
                return found
        found = func(*map_leaves(whole_of, args), **map_leaves(whole_of, kwargs))
        for x in leaves((args, kwargs)):
            if isinstance(x, BandedTensor) and x._source.computed and _has_memory_of(x, found):
                x._source.complete()  # a plain tensor, through which these bands may change unseen
        return found


def _has_memory_of(x: BandedTensor, found: Any) -> bool:
    """Whether a result is, or has, a view of `x`, of any shape."""
    own = _plain(x).untyped_storage().data_ptr()  # 0 on the meta device
    return own != 0 and any(each.untyped_storage().data_ptr() == own for each in map(_plain, tensors_in(found)))


def _by_bands(name: str, func: Callable[..., Any], args: Any, kwargs: Any, sources: Sequence[_Source]) -> Any:
    """Return the result of a function with its bands still to come; NotImplemented where they cannot be."""
    source = sources[0]
    if not (all(map(source.is_like, sources)) and _keeps_bands(name, source, args, kwargs)):
        return NotImplemented
    result = func(*map_leaves(_plain, args), **map_leaves(_plain, kwargs))  # of what is not here: for its shape
    results = [result] if isinstance(result, Tensor) else list(result)
    if not all(isinstance(x, Tensor) and source.cuts(x) for x in results):
        return NotImplemented
    args, kwargs = map_leaves(_kept, (args, kwargs))

    def part(index: int, band: int) -> Tensor:
        def of_band(x: Any) -> Any:
            if isinstance(x, BandedTensor):
                return x.band(band)
            return source.narrow(x, band) if isinstance(x, Tensor) else x

        found = func(*map_leaves(of_band, args), **map_leaves(of_band, kwargs))
        return found if isinstance(found, Tensor) else found[index]

    banded = [
        BandedTensor.of(_void_like(x), source.dim, source.sizes, partial(part, index))
        for index, x in enumerate(results)
    ]
    for each in sources:
        each.computed += map(ref, banded)
    return banded[0] if isinstance(result, Tensor) else tuple(banded)


def _writes(name: str) -> bool:
    """Whether a function of that name may change its argument."""
    return name == "__setitem__" or name.startswith("__i") or (name.endswith("_") and not name.endswith("__"))


def _kept(x: Any) -> Any:
    """Return an argument as it is now: a plain tensor may change before the last band comes."""
    return x if isinstance(x, BandedTensor) or not isinstance(x, Tensor) else x.clone()


def _void_like(x: Tensor) -> Tensor:
    """Return memory for a tensor of any shape: NaN, or zeros for integers, so that no use goes unnoticed."""
    return torch.full_like(x, torch.nan if x.is_floating_point() else 0)


def _keeps_bands(name: str, source: _Source, args: Any, kwargs: Any) -> bool:
    """Whether a function computes each element alone, or is chunk or cat of tensors with all bands."""
    if name not in _BESIDE:
        return name in _OF_ELEMENTS
    tensors = [x for x in leaves((args, kwargs)) if isinstance(x, Tensor)]
    return all(x.ndim == tensors[0].ndim and source.cuts(x) for x in tensors)


def _plain(x: Any) -> Any:
    if not isinstance(x, BandedTensor):
        return x
    with torch._C.DisableTorchFunctionSubclass():
        return x.as_subclass(Tensor)


def whole_of(x: Any) -> Any:
    """Return a BandedTensor, of any shape, with all bands, and anything else as it is."""
    return x.whole() if isinstance(x, BandedTensor) else x
