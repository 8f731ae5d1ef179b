"""Texts as they are encoded beside those of the other ranks of axis `data`.

Many pipelines pad the texts of a call to the longest, and some give their denoisers the padding without a mask: what a
prompt gives depends on the others then. So what `encode_prompt` makes of our prompts is held against what it makes of
all. Where only the number of prompts differs, ours stays; where lengths do, our rows of the whole take its place.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from patchpar.errors import PlanError

METHOD = "encode_prompt"  # of pipelines of diffusers, and all that begin so
IMAGES_EACH = ("num_images_per_prompt", "num_videos_per_prompt", "num_waveforms_per_prompt")


@dataclass(frozen=True, slots=True, kw_only=True)
class Texts:
    """A call's arguments for all prompts and for those of this rank: `own` of `total`.

    `rows` says which of so many rows of all are ours.
    """

    whole_call: Mapping[str, Any]
    own_call: Mapping[str, Any]
    own: int
    total: int
    rows: Callable[[int], slice]

    def for_all(self, value: Any) -> Any:
        """An argument of `encode_prompt` for all prompts; the same object where it is none of each prompt."""
        for name, own in self.own_call.items():
            if self.whole_call[name] is not own and (own is value or _are_the_same(own, value)):
                return self.whole_call[name]
        if isinstance(value, list) and len(value) == self.own and all(_is_text(each, value[0]) for each in value):
            return value[:1] * self.total  # the pipeline's own negative prompt, one for each
        return value

    def among(self, own: Any, whole: Any, images: int = 1) -> Any:
        """What stands for our prompts: what was encoded of them alone, or their rows of all. Raises PlanError.

        `images`: how many rows in a row each prompt has; branches of guidance may come one after another.
        """
        return own if self._are_alike(own, whole) else self._ours(own, whole, images)

    def _are_alike(self, own: Any, whole: Any) -> bool:
        """Whether they differ in the number of prompts only."""
        if isinstance(own, Tensor) and isinstance(whole, Tensor):
            of_each = len(own) * self.total == len(whole) * self.own if own.ndim else True
            return own.shape == whole.shape or (of_each and own.shape[1:] == whole.shape[1:])
        return all(self._are_alike(*pair) for pair in zip(_items(own), self._items_of(own, whole), strict=True))

    def _items_of(self, own: Any, whole: Any) -> Sequence[Any]:
        items = _items(whole)
        return items if len(items) == len(_items(own)) else items[self.rows(len(items))]  # one for each prompt

    def _ours(self, own: Any, whole: Any, images: int) -> Any:
        if isinstance(whole, Tensor):
            return self._rows_of(own, whole, images)
        found = [self._ours(*pair, images) for pair in zip(_items(own), self._items_of(own, whole), strict=True)]
        if isinstance(whole, Mapping):
            return type(whole)(**dict(zip(whole, found, strict=True)))
        return type(whole)(found) if isinstance(whole, (list, tuple)) else whole

    def _rows_of(self, own: Any, whole: Tensor, images: int) -> Tensor:
        if whole.ndim == 0 or (isinstance(own, Tensor) and len(own) * self.total != len(whole) * self.own):
            return whole  # of no prompt in particular, such as the positions of the longest text
        branches, rest = divmod(len(whole), self.total * images)
        if rest:
            raise PlanError(
                f"how long a text is encoded depends on the other prompts of the call, and of which of the "
                f"{self.total} prompts each of its {len(whole)} rows is cannot be told, so that data ranks would give "
                "other images: use data=1"
            )
        of_branches = whole.reshape(branches, self.total * images, *whole.shape[1:])
        return of_branches[:, self.rows(self.total * images)].flatten(0, 1)


@contextmanager
def encoded_together(pipe: Any, texts: Texts) -> Iterator[None]:
    """While open, the pipeline encodes our prompts as it does beside all others."""
    names = [name for name in dir(type(pipe)) if name.startswith(METHOD)]
    for name in names:
        setattr(pipe, name, _together(getattr(pipe, name), texts))
    try:
        yield
    finally:
        for name in names:
            delattr(pipe, name)


def _together(plain: Callable[..., Any], texts: Texts) -> Callable[..., Any]:
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
        return texts.among(own, plain(*bound.args, **bound.kwargs), images_each(given))

    return encode_prompt


def images_each(arguments: Mapping[str, Any]) -> int:
    """How many results each prompt gives."""
    return next((arguments[name] for name in IMAGES_EACH if arguments.get(name)), 1)


def _are_the_same(own: Any, value: Any) -> bool:
    """Whether two lists hold the same things, such as a list of texts and a copy of it."""
    if not (isinstance(own, list) and isinstance(value, list) and own and len(own) == len(value)):
        return False
    return all(one is other or _is_text(one, other) for one, other in zip(own, value, strict=True))


def _is_text(one: Any, other: Any) -> bool:
    return isinstance(one, str) and isinstance(other, str) and one == other


def _items(value: Any) -> Sequence[Any]:
    if isinstance(value, Mapping):
        return list(value.values())
    return value if isinstance(value, (list, tuple)) else ()
