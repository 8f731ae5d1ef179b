"""Arguments whose text is their value, converted without typer, whose coercion imports pydantic.

That takes longer than `patchpar plan` of a kept plan otherwise does. Whatever is not plain (a path, a list, a flag with
a callback, an option without a value, a value that is wrong) is left to typer, and so are its messages.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

WHOLE, NUMBER = re.compile(r"-?[0-9]{1,9}"), re.compile(r"-?[0-9]{1,9}(\.[0-9]{1,9})?")


def plain_arguments(
    parameters: Iterable[Any], given: Mapping[str, Any], hints: Mapping[str, Any]
) -> dict[str, Any] | None:
    """Return the values of what is `given` on the command line, by name; None unless all are plain.

    `hints`: the types of the parameters. Those that are not given are left out.
    """
    by_name = {each.name: each for each in parameters}
    if any(each.required and given.get(name) is None for name, each in by_name.items()):
        return None
    found: dict[str, Any] = {}
    for name, value in given.items():
        if value is None:
            continue
        parameter = by_name.get(name)
        if parameter is None or parameter.callback is not None:
            return None
        found[name] = _converted(hints.get(name), value)
        if found[name] is None:
            return None
    return found


def _converted(hint: Any, value: Any) -> Any:
    """Return a value in the type of its hint; None unless it is plain."""
    kind = _kind_of(hint)
    if kind is bool:
        return value if isinstance(value, bool) else None
    if not isinstance(value, str):
        return None
    if get_origin(kind) is Literal:
        return value if value in get_args(kind) else None
    return READERS[kind](value) if kind in READERS else None


def _kind_of(hint: Any) -> Any:
    """Return the type of a hint, without what is noted beside it and without None."""
    if get_origin(hint) is Annotated:
        return _kind_of(get_args(hint)[0])
    if get_origin(hint) in (Union, UnionType):
        kinds = [each for each in get_args(hint) if each is not type(None)]
        return _kind_of(kinds[0]) if len(kinds) == 1 else None
    return hint


READERS: Mapping[Any, Callable[[str], Any]] = MappingProxyType(
    {
        str: lambda text: text,
        int: lambda text: int(text) if WHOLE.fullmatch(text) else None,
        float: lambda text: float(text) if NUMBER.fullmatch(text) else None,
    }
)
