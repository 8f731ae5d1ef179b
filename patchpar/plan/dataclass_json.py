"""Frozen dataclasses from untrusted JSON: values of other than the declared types are refused."""

from collections.abc import Mapping
from dataclasses import is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")


def decoded(kind: type[T], value: Any) -> T:
    """Return a value of the type `kind` from the output of `dataclasses.asdict` and `json`.

    Supports dataclasses, tuples, frozensets, mappings, `X | None`, numbers, strings and Any. Raises TypeError,
    ValueError or KeyError for a value of another type and for unknown fields.
    """
    return _decoded(kind, value)


def _decoded(kind: Any, value: Any) -> Any:
    origin, args = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        (kind,) = (each for each in args if each is not NoneType)
        return None if value is None else _decoded(kind, value)
    if origin is not None:
        return _collection(origin, args, value)
    if is_dataclass(kind):
        return _object(kind, value)
    if kind is float:
        return _number(value)
    return value if kind is Any else _of(kind, value)


def _object(kind: Any, value: Any) -> Any:
    hints = _hints(kind)
    return kind(**{name: _decoded(hints[name], item) for name, item in _of(dict, value).items()})


def _collection(origin: Any, args: tuple[Any, ...], value: Any) -> Any:
    if origin is Mapping:
        return {_key(args[0], key): _decoded(args[1], item) for key, item in _of(dict, value).items()}
    items = _of(list, value)
    kinds = args if origin is tuple and args[-1] is not Ellipsis else args[:1] * len(items)
    return origin(_decoded(each, item) for each, item in zip(kinds, items, strict=True))


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


def _key(kind: Any, key: str) -> Any:
    """Return a key of the type `kind`: JSON has string keys only."""
    return int(key) if kind is int else key


def _number(value: Any) -> float:
    try:
        return float(value if isinstance(value, float) else _of(int, value))
    except OverflowError as error:
        raise ValueError("an integer too large for a float") from error


def _of(kind: type[T], value: Any) -> T:
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise TypeError(f"{value!r:.80} where a {kind.__name__} was written")
    return value
