"""Imports of diffusers and transformers without what takes seconds and is needed by few programs.

Both import torch._dynamo, torch's compiler, to decorate a few functions, and operators on the meta device ask for
symbolic shapes, which need sympy; torch imports its exporter, and diffusers requests. Inside `quick_imports` these
modules are empty at first: each answers what is asked of it where nothing is compiled or symbolic, and runs when
anything else is asked. Packages of diffusers that import all of their modules run when a name is looked up in them; an
import of one of their modules does not run the others. diffusers also lists the files of every installed package; the
list is made when something is looked up in it. transformers reads all its files for the names in them, twice, since it
remembers 128 folders of some 500. torch looks at all modules for the line and the module where an operator is defined.
"""

import importlib.metadata
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial, wraps
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from operator import eq
from types import FrameType, ModuleType
from typing import Any

from patchpar.models.changed_modules import ChangingFinder

LOADER, DEFERRAL, DECORATIONS = "_deferred_loader", "_deferral", "_deferred_decorations"


class DeferredModule(ModuleType):
    """A module that runs at the first attribute of which its deferral has no answer."""

    def __getattr__(self, name: str) -> Any:
        """Return an attribute. Raises AttributeError for one that the module has not either."""
        if name.startswith("__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        answer = self.__dict__[DEFERRAL].answers.get(name)
        if answer is not None:
            found = self.__dict__[name] = answer(self, name)  # torch asks for some of them thousands of times
            return found
        return getattr(self.run(), name)

    def run(self) -> ModuleType:
        """Return the module after it has run, with what was to be decorated."""
        loader, decorations, deferral = (self.__dict__.pop(key) for key in (LOADER, DECORATIONS, DEFERRAL))
        self.__class__ = ModuleType  # type: ignore[assignment]  # as importlib.util.LazyLoader does
        for name in deferral.answers:
            self.__dict__.pop(name, None)
        loader.exec_module(self)
        for decorate in decorations:
            decorate(self)
        return self

    def defer(self, decorate: Callable[[Any], Any]) -> None:
        """Call `decorate` with the module after it has run."""
        self.__dict__[DECORATIONS].append(decorate)


@dataclass(frozen=True, slots=True, kw_only=True)
class Deferral:
    """A module to defer. `answers`: by attribute, called with the module and the name.

    `alone`: its submodules that do not need it to have run; None for all. `first`: what is imported in its place.
    """

    module: str
    answers: Mapping[str, Callable[[DeferredModule, str], Any]] = field(default_factory=dict)
    alone: frozenset[str] | None = None
    first: str = ""


def decorated_later(module: DeferredModule, name: str) -> Callable[[Any], Any]:
    """Return a decorator that returns what it is given, and calls that of the module after it has run."""

    def decorate(function: Any) -> Any:
        if not isinstance(module, DeferredModule):
            return getattr(module, name)(function)
        module.defer(lambda loaded: getattr(loaded, name)(function))
        return function

    return decorate


def wrap_later(module: DeferredModule, name: str) -> Callable[..., Any]:
    """Return a decorator whose functions call those that the module's decorator makes after it has run."""

    def wrap(function: Any = None, *args: Any, **options: Any) -> Any:
        if not isinstance(module, DeferredModule):
            return getattr(module, name)(function, *args, **options)
        if function is None:
            return lambda given: wrap(given, *args, **options)
        target = [function]

        @wraps(function)
        def wrapped(*given: Any, **named: Any) -> Any:
            return target[0](*given, **named)

        module.defer(lambda loaded: target.__setitem__(0, getattr(loaded, name)(function, *args, **options)))
        return wrapped

    return wrap


class NoInstances:
    """Stands for a class of which nothing can be as long as its module has not run."""


class CompiledFrames:
    """Stands for a submodule with the class of compiled networks, and runs the `compiler` for anything else of it."""

    OptimizedModule = NoInstances

    def __init__(self, compiler: DeferredModule, name: str) -> None:
        self._compiler, self._name = compiler, name

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the submodule."""
        return getattr(getattr(self._compiler.run(), self._name), name)


def called_later(module: DeferredModule, name: str, known: Callable[..., bool] | None = None) -> Callable[..., Any]:
    """Return a function that runs the module when called, unless nothing is symbolic and `known` has an answer."""

    def function(*args: Any, **options: Any) -> Any:
        if known is not None and not options and all(map(is_plain, args)):
            return known(*args)
        return getattr(module.run() if isinstance(module, DeferredModule) else module, name)(*args, **options)

    return function


def is_plain(x: Any) -> bool:
    """Return whether this is a boolean, a number, or a shape of numbers."""
    return type(x) in (bool, int) or (isinstance(x, tuple) and all(type(size) is int for size in x))


COMPILER = Deferral(
    module="torch._dynamo",
    answers={
        **dict.fromkeys(("allow_in_graph", "assume_constant_result"), decorated_later),
        "disable": wrap_later,
        "is_compiling": lambda module, name: lambda: type(module) is ModuleType and getattr(module, name)(),
        "eval_frame": CompiledFrames,
    },
    alone=frozenset({"_trace_wrapped_higher_order_op"}),  # for transformers
)
GUARDS = ("expect_true", "guard_or_false", "guard_or_true", "guard_size_oblivious", "statically_known_true")
SYMBOLS = Deferral(
    module="torch.fx.experimental.symbolic_shapes",
    answers={
        **dict.fromkeys(GUARDS, partial(called_later, known=bool)),
        "sym_and": partial(called_later, known=lambda *given: all(given)),
        "sym_or": partial(called_later, known=lambda *given: any(given)),
        "sym_eq": partial(called_later, known=eq),
        "is_nested_int": partial(called_later, known=lambda size: False),
        **dict.fromkeys(("guarding_hint_or_throw", "has_guarding_hint", "has_free_unbacked_symbols"), called_later),
    },
)
ALGEBRA = Deferral(module="sympy", answers={"Basic": lambda *_: NoInstances}, alone=frozenset())
NETWORKS = ("models.transformers", "models.autoencoders", "models.unets", "hooks")
PACKAGES = tuple(Deferral(module=f"diffusers.{name}") for name in NETWORKS)
DOWNLOADS = Deferral(module="requests", alone=frozenset())  # for images and videos by URL
EXPORT = Deferral(module="torch.export", first="torch.fx")  # which torch._logging needs first, from 2.15 on
UNUSED = tuple(Deferral(module=f"torch.{name}") for name in ("masked", "nn.intrinsic", "quantization"))
"""Packages that torch imports for who looks for them in it."""
DEFERRED = (COMPILER, SYMBOLS, ALGEBRA, EXPORT, DOWNLOADS, *UNUSED, *PACKAGES)

SCANNING, SCAN, NAMES = "transformers.utils.import_utils", "create_import_structure_from_path", "fetch__all__"
"""The module of transformers that reads files for the names in them, its cached function for a folder, and the one for
what `__all__` lists in a file, which looks at every line."""


def scan_quickly(module: Any) -> None:
    """Let the function SCAN of a module remember all folders, if it remembers any, and NAMES begin at the last list."""
    scan, names = getattr(module, SCAN, None), getattr(module, NAMES, None)
    if scan is not None and hasattr(scan, "cache_info"):
        setattr(module, SCAN, cache(scan.__wrapped__))
    if names is not None:
        setattr(module, NAMES, lambda content: names(content[content.rfind("\n__all__") + 1 :]))


OPERATORS, SOURCE = "torch._library.utils", "get_source"
"""The module of torch that notes where an operator is defined, and its function, which looks at all modules."""


def name_source_quickly(module: Any) -> None:
    """Let the function SOURCE of a module, if it has one, take file and line of a frame from the frame."""

    def get_source(stacklevel: int) -> str:
        frame = sys._getframe(stacklevel)
        return f"{frame.f_code.co_filename}:{frame.f_lineno}"

    if hasattr(module, SOURCE):
        setattr(module, SOURCE, get_source)


LIBRARIES, INSPECTION = "torch.library", "inspect"


def module_of(frame: FrameType) -> ModuleType | None:
    """Return the module whose code runs in a frame, as `inspect.getmodule`, without a look at all others."""
    return sys.modules.get(frame.f_globals.get("__name__", ""))


def name_module_quickly(module: Any) -> None:
    """Let a module that asks INSPECTION in which module an operator is registered ask one like it with `module_of`."""
    inspect = getattr(module, INSPECTION, None)
    if inspect is not None:
        quick = ModuleType(INSPECTION)
        quick.__dict__.update({**vars(inspect), "getmodule": module_of})
        setattr(module, INSPECTION, quick)


CHANGES = {SCANNING: scan_quickly, OPERATORS: name_source_quickly, LIBRARIES: name_module_quickly}


class DeferringLoader(Loader):
    """Makes a DeferredModule for the `loader` of the real one."""

    def __init__(self, loader: Loader, deferral: Deferral) -> None:
        self._loader, self._deferral = loader, deferral

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """See Loader."""
        return DeferredModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """See Loader. Nothing runs yet."""
        module.__dict__.update({LOADER: self._loader, DEFERRAL: self._deferral, DECORATIONS: []})
        if self._deferral.first:
            importlib.import_module(self._deferral.first)


class DeferringFinder(MetaPathFinder):
    """Finds modules as deferred ones, as long as it `defers`, and runs those that a submodule needs."""

    def __init__(self, deferred: Sequence[Deferral]) -> None:
        self.deferred, self.defers = tuple(deferred), True
        self._by_name = {each.module: each for each in deferred}

    @property
    def is_needed(self) -> bool:
        """Whether some module has not run yet."""
        return any(isinstance(sys.modules.get(name), DeferredModule) for name in self._by_name)

    @property
    def is_second(self) -> bool:
        """Whether an earlier finder of the same modules is still there."""
        finders = [each for each in sys.meta_path if isinstance(each, DeferringFinder) and each is not self]
        return any(each.deferred == self.deferred for each in finders)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """See MetaPathFinder."""
        package, _, part = fullname.rpartition(".")
        needed = self._by_name[package].alone if package in self._by_name else None
        if needed is not None and part not in needed and isinstance(sys.modules[package], DeferredModule):
            sys.modules[package].run()
        deferral = self._by_name.get(fullname) if self.defers else None
        found = None if deferral is None else PathFinder.find_spec(fullname, path)
        if deferral is not None and found is not None and found.loader is not None:
            found.loader = DeferringLoader(found.loader, deferral)
        return found


class PackagesWhenAsked(Mapping[str, list[str]]):
    """Names of distributions by importable name, found by `find` when something is looked up."""

    def __init__(self, find: Callable[[], Mapping[str, list[str]]]) -> None:
        self._find = cache(find)

    def __getitem__(self, name: str) -> list[str]:
        return self._find()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._find())

    def __len__(self) -> int:
        return len(self._find())


@contextmanager
def quick_imports(deferred: Sequence[Deferral] = DEFERRED) -> Iterator[None]:
    """Context in which imports run no `deferred` module, nor list installed packages, before something needs it.

    Nor do they look twice for the names in a file. Nothing changes for what was imported before. Modules that have not
    run at the end do so when they are needed.
    """
    finder, packages = DeferringFinder(deferred), importlib.metadata.packages_distributions
    changing = ChangingFinder(CHANGES)
    sys.meta_path[:0] = [finder, changing]
    importlib.metadata.packages_distributions = partial(PackagesWhenAsked, packages)
    try:
        yield
    finally:
        sys.meta_path.remove(changing)
        finder.defers = False
        if not finder.is_needed or finder.is_second:
            sys.meta_path.remove(finder)
        importlib.metadata.packages_distributions = packages
