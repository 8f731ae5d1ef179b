"""Parameters of a pipeline's call, with their defaults."""

import inspect
from typing import Any

_VARIADIC = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)


def parameters_of(kind: type) -> dict[str, Any]:
    """Return the parameters of a pipeline's call with defaults; those of its base class where it takes `**kwargs`."""
    found: dict[str, Any] = {}
    for each in kind.__mro__:
        if "__call__" in vars(each):
            for parameter in inspect.signature(each.__call__).parameters.values():
                if parameter.name != "self" and parameter.kind not in _VARIADIC:
                    found.setdefault(parameter.name, _plain(parameter.default))
            if not passes_on(each):
                break
    return found


def passes_on(kind: Any) -> bool:
    """Return whether the call of a class takes `**kwargs`."""
    signature = inspect.signature(kind.__call__)
    return any(p.kind is inspect.Parameter.VAR_KEYWORD for p in signature.parameters.values())


def _plain(default: Any) -> Any:
    return default if isinstance(default, (int, float, str, bool)) else None
