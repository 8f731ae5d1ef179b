"""Optional libraries that a process takes to be absent, since it only records what calls would do.

diffusers and transformers import these where they are installed, for adapters, quantised weights and training, and do
without them where they are not. A process that has left them out stays so: it is for commands that end afterwards.
"""

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

LIBRARIES = (
    *("accelerate", "peft", "bitsandbytes", "torchao", "optimum", "deepspeed", "xformers", "flash_attn"),
    *("sklearn", "pandas", "wandb"),
)
DISTRIBUTED = "torch.distributed"
"""Says that it is not available, so that no tensors over several processes are imported."""


def leave_out_libraries() -> None:
    """Let LIBRARIES be absent from now on, except for those that were imported before. Idempotent."""
    for name in LIBRARIES:
        sys.modules.setdefault(name, None)  # type: ignore[arg-type]  # as the import system documents
    if DISTRIBUTED not in sys.modules and not any(isinstance(each, AloneFinder) for each in sys.meta_path):
        sys.meta_path.insert(0, AloneFinder())


class AloneLoader(Loader):
    """Runs a module by its own `loader`, and lets it say that it is not available."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """See Loader."""
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """See Loader."""
        self._loader.exec_module(module)
        module.is_available = lambda: False  # type: ignore[attr-defined]


class AloneFinder(MetaPathFinder):
    """Finds DISTRIBUTED for a process that is alone."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """See MetaPathFinder."""
        found = PathFinder.find_spec(fullname, path) if fullname == DISTRIBUTED else None
        if found is not None and found.loader is not None:
            found.loader = AloneLoader(found.loader)
        return found
