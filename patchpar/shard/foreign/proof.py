"""Prove that a function of torch commutes with the split: that our part of its result follows from our parts alone.

The function runs on random tensors as large as those of the plain call and on our parts of them. If the results are the
same part of one another, the function mixes no positions that are on different ranks, whatever the values.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from patchpar.shard.foreign.cuts import Cut
from patchpar.shard.foreign.functions import FunctionCall, Many, Spec, Unknown
from patchpar.shard.generator_states import GeneratorStates
from patchpar.shard.verification import TOLERANCE, relative_error

LIMIT = {**TOLERANCE, torch.float32: 1e-5}
UNDEFINED = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "data_ptr", "numpy", "__array__")
"""Functions that return what is in memory, or hand tensors to code that is no function of torch."""


def is_local(plain: FunctionCall, own: FunctionCall, cuts: Sequence[Cut], device: torch.device) -> bool:
    """Whether the function of the split call `own` returns our part of what it returns in the `plain` call.

    `cuts`: how sizes may be divided. Runs the function a few times on the device.
    """
    if own.on_local_tokens:
        return True
    if plain.function is not own.function or getattr(own.function, "__name__", "") in UNDEFINED:
        return False
    generators = GeneratorStates({}, device)
    try:
        return any(all(_passes(plain, own, cut, generators, sign) for sign in (False, True)) for cut in cuts)
    except Exception:  # noqa: BLE001 - whatever it raises: the function does not take such tensors: not proved
        return False
    finally:
        generators.restore()


class _NotAlikeError(Exception):
    """Arguments that are not parts of one another."""


def _passes(plain: FunctionCall, own: FunctionCall, cut: Cut, generators: GeneratorStates, signed: bool) -> bool:
    made = _Pairs(cut, generators.device, signed)
    pairs = [made.pair(x, y) for x, y in ((plain.args, own.args), (plain.kwargs, own.kwargs))]
    results = []
    for side in (0, 1):
        generators.restore()  # a function that samples samples the same
        results.append(own.function(*pairs[0][side], **pairs[1][side]))
    if not made.is_cut and (plain.args, plain.kwargs) == (own.args, own.kwargs):
        return True  # the same function of the same arguments
    return _is_part(results[0], results[1], cut, signed) and all(_is_part(x, y, cut, signed) for x, y in made.tensors)


class _Pairs:
    """Makes arguments of the plain call with random values, and our parts of them."""

    def __init__(self, cut: Cut, device: torch.device, signed: bool) -> None:
        self._cut, self._device, self._signed = cut, device, signed
        self.tensors: list[tuple[Tensor, Tensor]] = []
        self.is_cut = False

    def pair(self, plain: Any, own: Any) -> tuple[Any, Any]:
        """Return arguments for both from their descriptions."""
        if type(plain) is not type(own) or isinstance(plain, Unknown):
            raise _NotAlikeError
        if isinstance(plain, Spec):
            return self._tensors(plain, own)
        if not isinstance(plain, Many):
            return plain, own
        if plain.kind is not own.kind or plain.keys != own.keys or len(plain.items) != len(own.items):
            raise _NotAlikeError
        pairs = [self.pair(x, y) for x, y in zip(plain.items, own.items, strict=True)]
        return tuple(_built(plain, [pair[side] for pair in pairs]) for side in (0, 1))

    def _tensors(self, plain: Spec, own: Spec) -> tuple[Tensor, Tensor]:
        if plain.dtype != own.dtype:
            raise _NotAlikeError
        whole = _random(plain, own, len(self.tensors), signed=self._signed).to(self._device)
        part = _part_of(whole, own.shape, self._cut)
        self.is_cut |= part is not whole
        pair = whole, part.clone() if part is whole else part
        self.tensors.append(pair)
        return pair


def _built(form: Many, items: list[Any]) -> Any:
    if form.kind is slice:
        return slice(*items)
    return dict(zip(form.keys, items, strict=True)) if form.kind is dict else form.kind(items)


def _random(plain: Spec, own: Spec, seed: int, *, signed: bool) -> Tensor:
    """Return random values that grow along every dim that is cut: a sum over a part is no sum over the whole."""
    generator = torch.Generator().manual_seed(seed)
    if plain.dtype is torch.bool or not (plain.dtype.is_floating_point or plain.dtype.is_complex):
        return torch.randint(0, 2, plain.shape, generator=generator).to(plain.dtype)
    values = torch.randn(plain.shape, generator=generator) if signed else torch.rand(plain.shape, generator=generator)
    for dim, (size, of_own) in enumerate(zip(plain.shape, own.shape, strict=True)):
        if size != of_own:
            ramp = torch.linspace(1, 3, size)
            values = (values if signed else values + 0.5) * ramp.view(-1, *[1] * (len(plain.shape) - dim - 1))
    return values.to(plain.dtype)


def _part_of(whole: Tensor, shape: Sequence[int], cut: Cut) -> Tensor:
    """Return our part, of a shape, of a whole tensor of any shape with as many dims; itself where it has that shape."""
    if whole.ndim != len(shape):
        raise _NotAlikeError
    for dim, (size, own) in enumerate(zip(tuple(whole.shape), shape, strict=True)):
        if size != own:
            positions = cut(size, own)
            if positions is None or len(positions) != own:
                raise _NotAlikeError
            whole = whole.index_select(dim, torch.as_tensor(positions, device=whole.device))
    return whole


def _is_part(whole: Any, own: Any, cut: Cut, signed: bool) -> bool:
    """Whether a result of our parts is our part of the result of the whole."""
    if isinstance(whole, Tensor) and isinstance(own, Tensor):
        want = _part_of(whole, own.shape, cut)
        if want.dtype != own.dtype:
            return False
        if not (own.is_floating_point() or own.is_complex()):
            return torch.equal(want, own)
        if signed and not bool(want.isfinite().all()):  # such as roots of negative numbers
            return torch.equal(want.isfinite(), own.isfinite())
        return _error(own, want) <= LIMIT.get(want.dtype, 1e-5)
    if isinstance(whole, (list, tuple)) and isinstance(own, (list, tuple)) and len(whole) == len(own):
        return all(_is_part(x, y, cut, signed) for x, y in zip(whole, own, strict=True))
    return whole is None and own is None  # a number is of all positions


def _error(own: Tensor, want: Tensor) -> float:
    if own.is_complex():
        own, want = torch.view_as_real(own), torch.view_as_real(want)
    return relative_error(own, want)
