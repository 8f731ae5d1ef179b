"""Modules of other libraries that are changed as soon as they have run, before anything else sees them."""

from collections.abc import Callable, Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

Change = Callable[[Any], None]
"""Called with a module that has just run."""


class ChangingLoader(Loader):
    """Runs a module by its own `loader`, and then changes it."""

    def __init__(self, loader: Loader, change: Change) -> None:
        self._loader, self._change = loader, change

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """See Loader."""
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """See Loader."""
        self._loader.exec_module(module)
        self._change(module)


class ChangingFinder(MetaPathFinder):
    """Finds modules that are changed. `changes`: by their names. First in `sys.meta_path`; those that ran before stay.

    Others are found as always.
    """

    def __init__(self, changes: Mapping[str, Change]) -> None:
        self.changes = dict(changes)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """See MetaPathFinder."""
        change = self.changes.get(fullname)
        found = None if change is None else PathFinder.find_spec(fullname, path)
        if change is not None and found is not None and found.loader is not None:
            found.loader = ChangingLoader(found.loader, change)
        return found
