"""A deferred module runs when something else is asked of it than it has answers to; what it decorated is as always."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from patchpar.models.quick_imports import (
    COMPILER,
    NAMES,
    SCAN,
    SYMBOLS,
    Deferral,
    DeferringFinder,
    PackagesWhenAsked,
    name_module_quickly,
    name_source_quickly,
    quick_imports,
    scan_quickly,
)

NAME = "compiler_of_a_test"
CODE = """
allowed = []
def allow_in_graph(function):
    allowed.append(function)
    return function
def disable(function, recursive=True):
    return lambda *args: ("disabled", recursive, function(*args))
def optimize():
    return "optimized"
def is_compiling():
    return True
def expect_true(x):
    return ("expected", x)
"""


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A deferred module in a package of its own."""
    folder = tmp_path / NAME
    folder.mkdir()
    (folder / "__init__.py").write_text(CODE)
    (folder / "part.py").write_text("VALUE = 3")
    (folder / "eval_frame.py").write_text("class OptimizedModule: pass")
    monkeypatch.syspath_prepend(tmp_path)
    deferral = Deferral(module=NAME, answers={**COMPILER.answers, **SYMBOLS.answers}, alone=frozenset({"part"}))
    before = [*sys.meta_path]
    with quick_imports([deferral]):
        found = import_module(NAME)
    yield found
    sys.meta_path[:] = before
    for name in (NAME, f"{NAME}.part", f"{NAME}.eval_frame"):
        sys.modules.pop(name, None)


def has_run(module: Any) -> bool:
    return "optimize" in vars(module)


def test_decorated_functions_are_decorated_when_it_runs(compiler: Any) -> None:
    """Afterwards at once, also by a decorator that was looked up before."""
    allow, disable = compiler.allow_in_graph, compiler.disable
    allowed = allow(has_run)
    disabled = compiler.disable(str.upper, recursive=False)
    bare = compiler.disable(recursive=True)(str.lower)
    assert allowed is has_run
    assert (disabled("a"), bare("A")) == ("A", "a")
    assert not has_run(compiler)
    assert compiler.optimize() == "optimized"
    assert has_run(compiler)
    assert compiler.allowed == [has_run]
    assert disabled("a") == ("disabled", False, "A")
    assert bare("A") == ("disabled", True, "a")
    allow(finders)
    assert compiler.allowed == [has_run, finders]
    assert disable(str.upper)("a") == ("disabled", True, "A")


def test_a_submodule_that_does_not_need_it_is_imported_alone(compiler: Any) -> None:
    """Any other one runs it first."""
    assert import_module(f"{NAME}.part").VALUE == 3
    assert not has_run(compiler)
    import_module(f"{NAME}.eval_frame")
    assert has_run(compiler)


def test_nothing_is_compiled_or_symbolic_before_it_runs(compiler: Any) -> None:
    assert not isinstance(compiler, compiler.eval_frame.OptimizedModule)
    assert compiler.expect_true(True) is True
    compiles = compiler.is_compiling
    assert not compiles()
    assert not has_run(compiler)
    assert compiler.expect_true("a symbol") == ("expected", "a symbol")
    assert has_run(compiler)
    assert compiles()


def test_what_others_rely_on_is_imported_in_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch.fx, which torch 2.15 cannot import from where it first asks for it but in torch.export."""
    (tmp_path / "late_of_a_test.py").write_text("import early_of_a_test")
    (tmp_path / "early_of_a_test.py").write_text(CODE)
    monkeypatch.syspath_prepend(tmp_path)
    with quick_imports([Deferral(module="late_of_a_test", first="early_of_a_test")]):
        late = import_module("late_of_a_test")
    assert has_run(sys.modules["early_of_a_test"])
    assert not hasattr(late, "__nothing__"), "which runs nothing"
    assert "early_of_a_test" not in vars(late)


def test_one_finder_stays_as_long_as_a_module_has_not_run(compiler: Any) -> None:
    """Also after a second context; none does where all have."""
    assert len(finders()) == 1
    with quick_imports(finders()[0].deferred):
        assert len(finders()) == 2
    assert len(finders()) == 1
    compiler.optimize()
    sys.meta_path.remove(finders()[0])
    with quick_imports([Deferral(module=NAME)]):
        pass
    assert not finders()


def finders() -> list[DeferringFinder]:
    """Those of this test's module."""
    found = [each for each in sys.meta_path if isinstance(each, DeferringFinder)]
    return [each for each in found if NAME in [deferral.module for deferral in each.deferred]]


def test_what_it_lacks_is_an_attribute_error(compiler: Any) -> None:
    with pytest.raises(AttributeError, match="nothing"):
        _ = compiler.nothing
    assert has_run(compiler)


def test_other_modules_run_as_always(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "another_of_a_test.py").write_text(CODE)
    monkeypatch.syspath_prepend(tmp_path)
    with quick_imports([Deferral(module=NAME)]):
        assert has_run(import_module("another_of_a_test"))


def test_packages_are_listed_when_something_is_looked_up() -> None:
    calls = []
    found = PackagesWhenAsked(lambda: calls.append(1) or {"PIL": ["pillow"]})
    assert not calls
    assert ("PIL" in found, found["PIL"], len(found), list(found)) == (True, ["pillow"], 1, ["PIL"])
    assert calls == [1]


def test_no_folder_is_read_twice() -> None:
    """The control: with its own cache, which is too small, all are."""
    read = list[int]()

    @lru_cache(maxsize=2)
    def scan(folder: int) -> int:
        read.append(folder)
        return folder

    module = SimpleNamespace(**{SCAN: scan})
    for remembering in (False, True):
        if remembering:
            scan_quickly(module)
        read.clear()
        for folder in (1, 2, 3) * 2:
            assert vars(module)[SCAN](folder) == folder
        assert read == [1, 2, 3] * (1 if remembering else 2)


def test_another_version_without_such_a_cache_is_left_as_it_is() -> None:
    bare = SimpleNamespace(**{SCAN: str.upper})
    for module in (bare, SimpleNamespace()):
        before = dict(vars(module))
        scan_quickly(module)
        assert vars(module) == before


@pytest.mark.parametrize(
    "text",
    [
        "import a\n\n__all__ = ['b', 'c']\n",
        "__all__ = ['b']",
        "__all__ = ['a']\n\n__all__ = [\n    'b',\n    'c',\n]\n",
        "x = '__all__'\n",
        "x = 1\n",
    ],
)
def test_names_are_those_of_the_last_list(text: str) -> None:
    """As transformers finds them in the whole file."""
    from transformers.utils.import_utils import fetch__all__

    module = SimpleNamespace(**{NAMES: fetch__all__})
    scan_quickly(module)
    assert vars(module)[NAMES](text) == fetch__all__(text)


def test_the_line_of_an_operator_is_that_which_torch_finds() -> None:
    module = SimpleNamespace(get_source=torch._library.utils.get_source)
    slow, line = module.get_source(1), sys._getframe().f_lineno
    name_source_quickly(module)
    assert slow == f"{__file__}:{line}"
    assert module.get_source(1) == f"{__file__}:{sys._getframe().f_lineno}"


def test_the_module_of_an_operator_is_that_which_torch_finds() -> None:
    """torch asks `inspect`, which looks at all modules for their files."""
    module = SimpleNamespace()
    name_module_quickly(module)
    assert not hasattr(module, "inspect"), "another version may not ask"
    module.inspect = inspect
    name_module_quickly(module)
    frame = sys._getframe()
    assert module.inspect.getmodule(frame) is inspect.getmodule(frame) is sys.modules[__name__]
    assert module.inspect.getmodule is not inspect.getmodule
    assert module.inspect.signature is inspect.signature
