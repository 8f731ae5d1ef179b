"""The rules that keep the package readable, as tests: who imports whom, one door to collectives, short files."""

import ast
from collections.abc import Collection, Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parent.parent
PACKAGE = REPOSITORY / "patchpar"
# A module may import modules of earlier lines, and of its own package.
LINES = (
    ("errors", "scalars", "compiled", "anonymous", "hooks", "tree", "generators", "precision"),
    ("json_files",),
    (
        "fingerprint",
        "plan",
        "patches",
        "clock",
        "measure",
        "verdicts",
        "pulse",
        "trace",
        "selection",
        "stepping",
        "refusal",
    ),
    ("resync", "figures", "key_exchange"),
    ("picture_file", "treatment"),
    ("launch", "run", "call"),
    ("mesh", "transport", "batch", "live", "changes"),
    ("traffic", "picture_arguments", "attention_sites", "branches", "given_back"),
    ("exchange", "promise"),
    ("layers", "discover", "predictions", "memory", "tokens", "residual", "pace", "correction"),
    ("sequence",),
    ("context", "share", "models"),
    ("stale_attention", "first_use"),
    ("seam", "attention", "fourier", "pooling", "adapter_masks"),
    ("shard", "history", "caches"),
    ("shared_denoiser",),
    ("patched", "ledger", "token_split", "vae"),
    ("highres", "carriers", "text_encoding"),
    ("strategies", "guided"),
    ("stream",),
    ("planner", "checks", "outcome", "attributes", "start", "drawing", "denoiser"),
    ("together", "state", "component", "installed"),
    ("engine",),
    ("pipeline",),
    ("upscaling",),
    ("cli",),
    ("__main__",),
)
LEVEL = {module: number for number, line in enumerate(LINES) for module in line}
# Stricter than the order above: pure modules need nothing but the tree of errors, launch knows nothing of diffusion,
# and the command line goes through the public names like everybody else. One looks up: a plan reads the text of its
# strategy when it is made, and only strategies know what theirs means.
ONLY = {
    "plan": {"errors", "scalars", "strategies"},
    "patches": {"errors"},
    "clock": {"errors"},
    "measure": {"errors"},
    "picture_file": {"errors"},
    "json_files": {"errors"},
    "verdicts": {"errors", "json_files"},
    "trace": {"errors"},
    "selection": {"errors"},
    "traffic": {"trace", "transport"},
    "resync": {"errors"},
    "key_exchange": {"errors", "scalars"},
    "treatment": {"errors", "key_exchange", "resync", "selection"},
    "figures": {"errors", "trace"},
    "call": {"errors", "figures", "plan"},
    "launch": {"anonymous", "errors", "scalars"},
    "live": {"errors"},
    "transport": {"anonymous", "errors"},
    "cli": {"errors", "measure", "launch", "live", "models", "picture_file", "strategies", "stream", "PUBLIC"},
    "__main__": {"cli"},
}
# The demo shows what pure modules know (plans, figures, traces), and nothing of how ranks work.
THE_APP_MAY = {
    *("PUBLIC", "plan", "run", "trace", "measure", "patches", "mesh", "checks", "planner", "strategies"),
    *("launch", "live", "models", "picture_file", "stream"),
}
FORBIDDEN_NAMES = {"utils", "util", "common", "helpers", "helper", "types", "base", "misc"}
MAY_TALK_TO_RANKS = {"transport", "launch"}
MAX_FILE_LINES = 300
MAX_FUNCTION_LINES = 50
FILES = sorted(PACKAGE.rglob("*.py"))
MODULES = sorted(path for path in FILES if path != PACKAGE / "__init__.py")


def name_of(path: Path) -> str:
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def imported(source: str, path: Path) -> Iterator[str]:
    """Top-level modules of patchpar that a file imports; 'PUBLIC' for a name of the package itself."""
    for name in names_imported(source, path):
        package, _, rest = name.partition(".")
        if package == "patchpar" and rest:
            module = rest.split(".")[0]
            yield module if module in LEVEL else "PUBLIC"


def names_imported(source: str, path: Path) -> Iterator[str]:
    """Dotted names of all that a file imports, wherever in it: modules, and what is in modules."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{absolute(node, path)}.{alias.name}" for alias in node.names)


def file_of(name: str, files: Collection[str]) -> str | None:
    """The module that a dotted name is, or is in."""
    return next((module for module in (name, name.rpartition(".")[0]) if module in files), None)


def refuse_circles(sources: Mapping[str, str]) -> None:
    """Raise graphlib.CycleError where files import each other, be it in functions or for types only."""
    graph = {
        module: {file_of(name, sources) for name in names_imported(source, PACKAGE)} - {None, module}
        for module, source in sources.items()
    }
    TopologicalSorter(graph).prepare()


def absolute(node: ast.ImportFrom, path: Path) -> str:
    if not node.level:
        return node.module or ""
    folder = path.relative_to(REPOSITORY).parts[: -node.level]
    return ".".join((*folder, *filter(None, [node.module])))


def wrong_imports(source: str, path: Path) -> list[str]:
    me = name_of(path)
    allowed = ONLY.get(me, {module for module in LEVEL if LEVEL[module] < LEVEL[me]}) | {me}
    return [module for module in imported(source, path) if module not in allowed]


def mentions(source: str, dotted: str) -> bool:
    """Whether code (not a comment or a docstring) imports or reads `dotted`, such as os.environ."""
    package, _, name = dotted.rpartition(".")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import) and any(
            alias.name == dotted or alias.name.startswith(f"{dotted}.") for alias in node.names
        ):
            return True
        if isinstance(node, ast.ImportFrom) and node.module:
            if node.module == dotted or node.module.startswith(f"{dotted}."):
                return True
            if node.module == package and any(alias.name == name for alias in node.names):
                return True
        if isinstance(node, ast.Attribute) and ast.unparse(node) == dotted:
            return True
    return False


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_one_way(path: Path) -> None:
    assert name_of(path) in LEVEL, f"{path.name} has no place in the order of imports: give it one in LINES"
    assert not wrong_imports(path.read_text(), path), f"{path} imports what stands beside or above it"


@pytest.mark.parametrize(
    ("module", "source", "wrong"),
    [
        ("layers.py", "from patchpar.pipeline import ParallelPipeline", ["pipeline"]),
        ("layers.py", "from patchpar import pipeline", ["pipeline"]),
        ("layers.py", "from . import pipeline", ["pipeline"]),
        ("layers.py", "from patchpar import Plan", ["PUBLIC"]),
        ("layers.py", "def f():\n    import patchpar.engine", ["engine"]),
        ("strategies/exact.py", "from ..pipeline import x", ["pipeline"]),
        ("launch/local.py", "from patchpar.plan import Plan", ["plan"]),
        ("cli/generate.py", "from patchpar.pipeline import ParallelPipeline", ["pipeline"]),
        ("cli/generate.py", "from patchpar import ParallelPipeline", []),
        ("launch/hello.py", "import patchpar", []),
        ("layers.py", "from patchpar.patches import Bands\nimport torch", []),
    ],
)
def test_the_import_rule_sees(module: str, source: str, wrong: list[str]) -> None:
    assert wrong_imports(source, PACKAGE / module) == wrong


def test_no_circle_of_files() -> None:
    parts = ((path, path.relative_to(REPOSITORY).with_suffix("").parts) for path in MODULES)
    refuse_circles({".".join(names).removesuffix(".__init__"): path.read_text() for path, names in parts})


@pytest.mark.parametrize("indent", ["", "if TYPE_CHECKING:\n    ", "def f():\n    "])
def test_the_circle_rule_sees(indent: str) -> None:
    sources = {"patchpar.plan": "import patchpar", "patchpar.mesh": "from patchpar.plan import Plan"}
    refuse_circles(sources)
    with pytest.raises(CycleError):
        refuse_circles(sources | {"patchpar.plan": f"{indent}from patchpar import mesh"})


def test_strategies_stand_alone() -> None:
    """A strategy imports no other, except a variant its parent: the file it names in its first line."""
    folder = PACKAGE / "strategies"
    names = {path.stem for path in folder.glob("*.py")} - {"__init__"}
    for path in sorted(folder.glob("*.py")):
        others = {
            alias
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.ImportFrom) and absolute(node, path) == "patchpar.strategies"
            for alias in (entry.name for entry in node.names)
        } | {
            absolute(node, path).removeprefix("patchpar.strategies.").split(".")[0]
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.ImportFrom) and absolute(node, path).startswith("patchpar.strategies.")
        }
        siblings = (others & names) - {path.stem, "strategy"}
        first_line = (ast.get_docstring(ast.parse(path.read_text())) or "").splitlines()[:1]
        if path.stem != "__init__":
            assert all(name in "".join(first_line) for name in siblings), f"{path.name} imports {siblings}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_one_door_to_the_other_ranks(path: Path) -> None:
    assert name_of(path) in MAY_TALK_TO_RANKS or not mentions(path.read_text(), "torch.distributed")


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_hidden_state(path: Path) -> None:
    source = path.read_text()
    assert not [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Global)]
    reads_environment = any(mentions(source, name) for name in ("os.environ", "os.getenv", "os.putenv"))
    assert name_of(path) == "launch" or not reads_environment


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_only_the_command_line_prints(path: Path) -> None:
    calls = [node.func for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    prints = [call for call in calls if isinstance(call, ast.Name) and call.id == "print"]
    assert name_of(path) == "cli" or not prints


@pytest.mark.parametrize(
    ("source", "dotted", "seen"),
    [
        ("import torch.distributed as dist", "torch.distributed", True),
        ("from torch import distributed", "torch.distributed", True),
        ("from torch.distributed.nn import functional", "torch.distributed", True),
        ("import torch\ntorch.distributed.barrier()", "torch.distributed", True),
        ("from os import environ", "os.environ", True),
        ("import os\nos.environ['A'] = '1'", "os.environ", True),
        ('"""Not os.environ."""', "os.environ", False),
        ("import torch.nn", "torch.distributed", False),
    ],
)
def test_the_door_rule_sees(source: str, dotted: str, seen: bool) -> None:
    assert mentions(source, dotted) == seen


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_files_and_functions_stay_short(path: Path) -> None:
    source = path.read_text()
    assert len(source.splitlines()) <= MAX_FILE_LINES
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            assert node.end_lineno is not None
            assert node.end_lineno - node.lineno < MAX_FUNCTION_LINES, f"{path.name}: {node.name}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_names_say_what_is_inside(path: Path) -> None:
    assert not FORBIDDEN_NAMES & set(path.relative_to(PACKAGE).with_suffix("").parts)


@pytest.mark.parametrize(("folder", "allowed"), [("pipelines", {"PUBLIC"}), ("app", THE_APP_MAY)])
def test_recipes_and_app_use_public_names(folder: str, allowed: set[str]) -> None:
    for path in sorted((REPOSITORY / folder).rglob("*.py")):
        assert set(imported(path.read_text(), path)) <= allowed, f"{path} reaches into the package"


def test_recipes_are_short() -> None:
    for path in sorted((REPOSITORY / "pipelines").glob("*.py")):
        assert len(path.read_text().splitlines()) <= 60, path.name
