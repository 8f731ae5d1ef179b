"""Engines by name, and their methods: what an executor runs on each rank."""

import importlib
from collections.abc import Callable
from typing import Any

from patchpar.errors import LaunchError
from patchpar.launch.executor import RankContext


def load_engine(name: str) -> Callable[[RankContext], Any]:
    """Return the class that "package.module:Class" names. Raises LaunchError if there is none."""
    module_name, colon, class_name = name.partition(":")
    if not (module_name and colon and class_name):
        raise LaunchError(f"engine {name!r} is not of the form 'package.module:Class'")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise LaunchError(f"cannot import the engine {name!r}: {error}") from error
    engine = getattr(module, class_name, None)
    if engine is None:
        raise LaunchError(f"cannot load the engine {name!r}: module {module_name} has no class {class_name!r}")
    return engine


def engine_method(engine: object, method: str) -> Callable[..., Any]:
    """Return a public method of an engine. Raises AttributeError that lists the available methods."""
    found = None if method.startswith("_") else getattr(engine, method, None)
    if not callable(found):
        public = sorted(name for name in dir(engine) if not name.startswith("_") and callable(getattr(engine, name)))
        raise AttributeError(f"{type(engine).__name__} has no method {method!r}; it has {', '.join(public)}")
    return found
