"""Text encoding on axis `data`, equal to that of one call with all prompts.

Many pipelines pad the texts of a call to the longest, and some give their denoisers the padding without a mask: the
embedding of a prompt then depends on the others. So `encode_prompt` is called for all of them too, and a rank takes its
rows of that. Where it is not known which these are, it takes what it has encoded alone, if that is as long.
"""

import inspect
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from patchpar.errors import PatchparError, PlanError
from patchpar.models.info import images_each
from patchpar.shard.hooks import HookSet
from patchpar.shard.unsupported_model import in_one_line

METHOD = "encode_prompt"  # of diffusers pipelines, and all methods whose names start so


@dataclass(frozen=True, slots=True, kw_only=True)
class TextArguments:
    """A call for all prompts, and for this rank's `own` of `total`. `rows(count)`: our part of `count` rows of all."""

    whole_call: Mapping[str, Any]
    own_call: Mapping[str, Any]
    own: int
    total: int
    rows: Callable[[int], slice]

    def for_all(self, value: Any) -> Any:
        """Return an argument of `encode_prompt` for all prompts; the same object if it has no entry per prompt."""
        pairs = [(own, self.whole_call[each]) for each, own in self.own_call.items()]
        for matches in (operator.is_, _are_the_same):  # two arguments may be alike for our prompts alone
            for own, whole in pairs:
                if whole is not own and matches(own, value):
                    return whole
        if isinstance(value, list) and len(value) == self.own and all(_is_text(each, value[0]) for each in value):
            return value[:1] * self.total  # the pipeline's own negative prompt, one for each
        return value

    def among(self, own: Any, whole: Any, images: int = 1) -> Any:
        """Return the encoding of our prompts: their rows of all, or that of them alone. Raises PlanError.

        `images`: the consecutive rows of each prompt; guidance branches may follow one another.
        """
        return self._ours(own, whole, images, alike=self._are_alike(own, whole))

    def _are_alike(self, own: Any, whole: Any) -> bool:
        """Return whether their shapes differ only in the number of prompts."""
        if isinstance(own, Tensor) and isinstance(whole, Tensor):
            batch = self._batch_dim(own, whole)
            own_shape, shape = ([size for dim, size in enumerate(x.shape) if dim != batch] for x in (own, whole))
            return own_shape == shape
        return all(self._are_alike(*pair) for pair in zip(_items(own), self._items_of(own, whole), strict=True))

    def _batch_dim(self, own: Any, whole: Tensor) -> int | None:
        """Return the dim that grows with the number of prompts; 0 if `own` is no tensor, such as no mask."""
        if not isinstance(own, Tensor):
            return 0 if whole.ndim else None
        if own.ndim != whole.ndim:
            return None
        sizes = enumerate(zip(own.shape, whole.shape, strict=True))
        return next((dim for dim, (few, many) in sizes if few * self.total == many * self.own), None)

    def _items_of(self, own: Any, whole: Any) -> Sequence[Any]:
        items = _items(whole)
        return items if len(items) == len(_items(own)) else items[self.rows(len(items))]  # one for each prompt

    def _ours(self, own: Any, whole: Any, images: int, *, alike: bool) -> Any:
        if isinstance(whole, Tensor):
            rows = self._rows_of(own, whole, images)
            if rows is None and not alike:
                raise PlanError(
                    "the length of an encoded text depends on the other prompts of the call, and which of the "
                    f"{whole.shape[self._batch_dim(own, whole) or 0]} rows belong to which of the {self.total} prompts "
                    "is unknown, so that data ranks would give other images: use data=1"
                )
            return own if rows is None else rows
        pairs = zip(_items(own), self._items_of(own, whole), strict=True)
        found = [self._ours(*pair, images, alike=alike) for pair in pairs]
        if isinstance(whole, Mapping):
            return type(whole)(**dict(zip(whole, found, strict=True)))
        if isinstance(whole, (list, tuple)):
            return type(whole)(*found) if hasattr(whole, "_fields") else type(whole)(found)
        return own if alike else whole

    def _rows_of(self, own: Any, whole: Tensor, images: int) -> Tensor | None:
        """Return our rows of all; None if they are unknown."""
        dim = self._batch_dim(own, whole)
        if dim is None:
            return whole  # of no prompt in particular, such as the positions of the longest text
        each, count = self.total * images, whole.shape[dim]
        branches, rest = divmod(count, each)
        if rest:
            return None
        rows = self.rows(each)
        starts = range(0, branches * each, each)
        return torch.cat([whole.narrow(dim, start + rows.start, rows.stop - rows.start) for start in starts], dim)


@contextmanager
def encoded_together(pipe: Any, texts: TextArguments) -> Iterator[None]:
    """While open, the pipeline encodes our prompts as in one call with all others."""
    names = [name for name in dir(type(pipe)) if name.startswith(METHOD)]
    with HookSet() as hooks:
        for name in names:
            hooks.replace(pipe, name, _together(getattr(pipe, name), texts))
        yield


def _together(plain: Callable[..., Any], texts: TextArguments) -> Callable[..., Any]:
    signature = inspect.signature(plain)

    def encode_prompt(*args: Any, **kwargs: Any) -> Any:
        own = plain(*args, **kwargs)
        bound = signature.bind(*args, **kwargs)
        given = dict(bound.arguments)
        bound.arguments.update({name: texts.for_all(value) for name, value in given.items()})
        if all(bound.arguments[name] is value for name, value in given.items()):
            return own
        if given.get("batch_size") == texts.own:
            bound.arguments["batch_size"] = texts.total
        try:
            return texts.among(own, plain(*bound.args, **bound.kwargs), images_each(given))
        except PatchparError:
            raise
        except (RuntimeError, ValueError, TypeError, LookupError) as error:
            raise PlanError(
                f"the texts of one rank can be encoded, but not those of all as in one call ({in_one_line(error)}): "
                "use data=1"
            ) from error

    return encode_prompt


def _are_the_same(own: Any, value: Any) -> bool:
    """Return whether two lists hold the same items, such as a list of texts and a copy of it."""
    if not (isinstance(own, list) and isinstance(value, list) and own and len(own) == len(value)):
        return False
    return all(one is other or _is_text(one, other) for one, other in zip(own, value, strict=True))


def _is_text(one: Any, other: Any) -> bool:
    return isinstance(one, str) and isinstance(other, str) and one == other


def _items(value: Any) -> Sequence[Any]:
    if isinstance(value, Mapping):
        return list(value.values())
    return value if isinstance(value, (list, tuple)) else ()
