"""The rules that keep the package readable, as tests: who imports whom, who communicates, short files."""

import ast
from collections.abc import Collection, Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.sources import nodes_of, statements_in, tree_of

REPOSITORY = Path(__file__).parent.parent
PACKAGE = REPOSITORY / "patchpar"
# A module may import modules of earlier lines, and of its own. Each line is one entry at the top of the package.
LINES = (
    ("errors",),
    ("plan",),
    ("launch",),
    ("comm",),
    ("shard",),
    ("models",),
    ("strategies",),
    ("media",),
    ("web",),
    ("stream",),
    ("pipeline",),
    ("serving",),
    ("cli",),
    ("__main__",),
)
LEVEL = {module: number for number, line in enumerate(LINES) for module in line}
# Stricter than the order above, for a subpackage or for one module of it: launch does not depend on diffusion, layers
# not on steps or ranks, pure modules on little but the tree of errors, and the command line uses the public names. One
# import goes up: a plan parses the text of its strategy when it is made, and only strategies can parse theirs.
ONLY = {
    "plan": {"errors"},
    "plan.plan": {"errors", "plan.mesh", "plan.names_elsewhere", "plan.scalars", "strategies"},
    "launch": {"errors", "plan.scalars"},
    "comm": {"errors", "plan.mesh", "launch.message_seal"},
    "comm.kernels": {"launch.accelerators"},
    "comm.transport": {
        *("errors", "comm.kernels.pack_tensors", "launch.accelerators", "launch.anonymous_file"),
        *("launch.descriptors", "launch.executor.RankContext", "launch.links", "launch.network.tagged_socket"),
        *("launch.hang_detection.WORK_TIMES", "launch.nccl_failures", "launch.rendezvous.this_host"),
        "launch.time_limit",
    },
    "shard.kernels": {"shard.precision", *(f"comm.kernels.{name}" for name in ("fused_op", "program", "repeated_op"))},
    "shard.unet.layers": {
        *("errors", "plan.bands", "shard.precision", "shard.kernels", "shard.unet.one_column"),
        *("comm.exchange_part.Halo", "comm.kernels.fused_op"),
    },
    "shard.verification_cache": {"errors", "plan.json_files"},
    "models.streaming": {
        *("errors", "plan", "models", "comm.collectives", "comm.transport"),
        *("shard.attention.head_exchange", "shard.hooks", "shard.host_memory"),
    },
    "media": {"errors", "plan.scalars", "launch.time_limit"},
    "media.image_file": {"errors"},
    "media.pcm_pipe": {"errors", "plan.scalars"},
    "media.resample": set(),
    "web": {
        "errors",
        "plan.json_files",
        *(f"media.{name}" for name in ("image_file", "mp4_fragments", "pcm_pipe", "resample")),
    },
    "stream": {"errors", "plan", "launch", "comm", "models", "media", "shard.hooks", "shard.host_memory"},
    "pipeline.image_metrics": {"errors"},
    "pipeline.messages": {"errors", "plan", "pipeline.rank_stats", "shard.generators", "shard.torch_switches"},
    "pipeline.rank_stats": {"errors", "comm.trace"},
    "cli": {
        *("errors", "plan.byte_sizes", "plan.scalars", "launch", "models", "strategies", "media", "web", "stream"),
        *("plan.stream_plan", "plan.stream_simulation", "pipeline.image_metrics"),
        "PUBLIC",
    },
    "serving.job": {"errors"},
    "serving.job_queue": {"errors", "serving.job"},
    "serving.latent_preview": {"errors"},
    "serving.scheduling": {"errors", "shard.verification_cache"},
    "serving.api_keys": {"errors"},
    "cli.serve": {"errors", "plan.scalars", "cli", "launch", "models", "serving", "shard.verification_cache"},
    "cli.bench": {
        *("errors", "cli", "launch", "models", "strategies", "pipeline.image_metrics", "shard.verification_cache"),
        "PUBLIC",
    },
    "cli.gpu_facts": {"plan.byte_sizes", "launch", "comm.kernels.triton_check"},
    "cli.plan": {"cli", "strategies", "pipeline.planner", "plan.byte_sizes", "plan.replay"},
    "cli.tune": {"cli", "launch.devices", "pipeline.planner", "plan.replay"},
    "cli.simulate": {
        *("errors", "cli", "strategies", "pipeline.planner", "plan.byte_sizes", "plan.replay"),
        "PUBLIC",
    },
    "__main__": {"cli"},
}
# The demo shows what pure modules know (plans, figures, traces), and nothing of how ranks work.
THE_APP_MAY = {
    *("PUBLIC", "plan", "launch", "comm.trace", "models", "strategies", "media", "web", "stream"),
    *("serving.job", "serving.job_queue", "serving.latent_preview", "serving.lora_registry"),
    *("pipeline.auto_plan", "pipeline.image_metrics", "pipeline.report", "pipeline.validate"),
    *("pipeline.planner.forecast", "pipeline.planner.search", "pipeline.planner.simulate", "pipeline.planner.tune"),
}
NAMES_OF_ACCELERATORS = {"cuda", "xpu", "npu", "mps"}
# Everything else asks launch.accelerators, so that a device of another type is no special case.
MAY_NAME_ACCELERATORS = {
    "launch.accelerators": "the facts by type",
    "pipeline.component_proxy": "a method of networks",
}
NAMES_OF_BACKENDS = {"nccl", "xccl", "hccl", "gloo", "mpi"}
# Everything else asks whether a backend is one of HOST_BACKENDS: those of all accelerators work in streams.
MAY_NAME_BACKENDS = {
    "launch.accelerators": "those whose waits block the process",
    "launch.nccl_failures": "NCCL, which has settings and groups of its own",
    "launch.control_group": "a group for what ranks tell one another, on the CPU",
    "launch.remote_errors": "what errors of torch say",
    "cli.gpu_facts": "a version that doctor prints",
    "cli.doctor": "a version that doctor prints",
}
# Modules that intercept calls of torch, with the reason. Any other uses HookSet and SdpaMode.
MAY_INTERCEPT = {
    "shard.hooks": ("hooks of modules, installed and removed in one place", {"hook"}),
    "shard.sdpa": ("attention, for all that replace it", {"mode"}),
    "shard.vae.functions": ("the functions of a VAE that read beyond a band", {"mode"}),
    "shard.transformer.token_call": ("modules of a block that sum or convolve tokens", {"mode"}),
    "shard.compiled_op": ("tracing of compiled blocks", {"mode"}),
    "models.deferred_casts": ("casts of weights while a model is loaded", {"mode"}),
    "models.dry_run.empty_pipeline": ("random values of weights that have none", {"mode"}),
    "models.dry_run.meta_mode": ("every operator of a call without values", {"mode"}),
    "pipeline.planner.cuts_without_values": ("what each operator of a call without values reads", {"mode"}),
    "shard.unet.whole_maps": ("Fourier transforms of whole maps, which a first call finds", {"mode"}),
    "shard.foreign.functions": ("what foreign code calls in a call of a network", {"mode"}),
}
FORBIDDEN_NAMES = {"utils", "util", "common", "helpers", "helper", "types", "base", "misc"}
MAY_TALK_TO_RANKS = ("comm.transport", "launch")
MAX_FILE_LINES = 300
MAX_FUNCTION_LINES = 50
FILES = sorted(PACKAGE.rglob("*.py"))
MODULES = sorted(path for path in FILES if path != PACKAGE / "__init__.py")


def name_of(path: Path) -> str:
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def short(path: Path) -> str:
    return str(path.relative_to(PACKAGE))


def dotted(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts)


def imported(source: str, path: Path) -> Iterator[str]:
    """What a file imports of patchpar, dotted, without the package; 'PUBLIC' for a name of the package itself."""
    for name in names_imported(source, path):
        package, _, rest = name.partition(".")
        if package == "patchpar" and rest:
            yield rest if rest.split(".")[0] in LEVEL else "PUBLIC"


def names_imported(source: str, path: Path) -> Iterator[str]:
    """Dotted names of all that a file imports, wherever in it: modules, and what is in modules."""
    for node in statements_in(source):
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


def is_in(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(f"{prefix}.")


def wrong_imports(source: str, path: Path) -> list[str]:
    me = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
    rules = [prefix for prefix in ONLY if is_in(me, prefix)]
    if rules:
        strictest = max(rules, key=len)
        allowed = ONLY[strictest] | {strictest}
    else:
        entry = name_of(path)
        allowed = {module for module in LEVEL if LEVEL[module] < LEVEL[entry]} | {entry}
    return [name for name in imported(source, path) if not any(is_in(name, prefix) for prefix in allowed)]


def mentions(source: str, name: str) -> bool:
    """Whether code (not a comment or a docstring) imports or reads `name`, such as os.environ."""
    package, _, last = name.rpartition(".")
    for node in nodes_of(source):
        if isinstance(node, ast.Import) and any(
            alias.name == name or alias.name.startswith(f"{name}.") for alias in node.names
        ):
            return True
        if isinstance(node, ast.ImportFrom) and node.module:
            if node.module == name or node.module.startswith(f"{name}."):
                return True
            if node.module == package and any(alias.name == last for alias in node.names):
                return True
        if isinstance(node, ast.Attribute) and node.attr == last and ast.unparse(node) == name:
            return True
    return False


def test_imports_point_one_way() -> None:
    """No module imports what stands beside or above it; each has a place in the order of imports, LINES."""
    assert [short(path) for path in MODULES if name_of(path) not in LEVEL] == []
    assert [(short(path), wrong) for path in MODULES if (wrong := wrong_imports(path.read_text(), path))] == []


@pytest.mark.parametrize(
    ("module", "source", "wrong"),
    [
        ("shard/batch.py", "from patchpar.pipeline.pipeline import Pipe", ["pipeline.pipeline.Pipe"]),
        ("shard/batch.py", "from patchpar import pipeline", ["pipeline"]),
        ("shard/batch.py", "from .. import pipeline", ["pipeline"]),
        ("shard/batch.py", "from patchpar import Plan", ["PUBLIC"]),
        ("shard/batch.py", "def f():\n    import patchpar.pipeline.runner", ["pipeline.runner"]),
        ("shard/batch.py", "from patchpar.plan.bands import Bands\nimport torch", []),
        ("shard/unet/layers.py", "from patchpar.plan.bands import Bands", []),
        ("shard/unet/layers.py", "from patchpar.plan.mesh import Mesh", ["plan.mesh.Mesh"]),
        ("strategies/exact.py", "from ..pipeline import x", ["pipeline.x"]),
        ("launch/local.py", "from patchpar.plan.plan import Plan", ["plan.plan.Plan"]),
        ("cli/generate.py", "from patchpar.pipeline.pipeline import x", ["pipeline.pipeline.x"]),
        ("cli/generate.py", "from patchpar import ParallelPipeline", []),
        ("launch/handshake.py", "import patchpar", []),
    ],
)
def test_the_import_rule_sees(module: str, source: str, wrong: list[str]) -> None:
    assert wrong_imports(source, PACKAGE / module) == wrong


def test_every_rule_is_of_a_module_that_is_there() -> None:
    modules = {".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__") for path in MODULES}
    folders = {".".join(prefix.split(".")[:depth]) for prefix in modules for depth in (1, 2, 3)}
    named = {prefix for only in ONLY.values() for prefix in only} | set(ONLY) | THE_APP_MAY
    assert {prefix for prefix in named if not {prefix, prefix.rpartition(".")[0]} & (modules | folders)} == {"PUBLIC"}


def test_few_entries_at_the_top() -> None:
    entries = {path.name for path in PACKAGE.iterdir()} - {"__pycache__", "py.typed"}
    assert entries == {"__init__.py", "__main__.py", "errors.py", *LEVEL} - {"errors", "__main__"}
    assert len(entries) <= 15


def test_no_circle_of_files() -> None:
    parts = ((path, path.relative_to(REPOSITORY).with_suffix("").parts) for path in MODULES)
    refuse_circles({".".join(names).removesuffix(".__init__"): path.read_text() for path, names in parts})


@pytest.mark.parametrize("indent", ["", "if TYPE_CHECKING:\n    ", "def f():\n    "])
def test_the_circle_rule_sees(indent: str) -> None:
    sources = {"patchpar.plan.plan": "import patchpar", "patchpar.plan.mesh": "from patchpar.plan.plan import Plan"}
    refuse_circles(sources)
    with pytest.raises(CycleError):
        refuse_circles(sources | {"patchpar.plan.plan": f"{indent}from patchpar.plan import mesh"})


def test_strategies_stand_alone() -> None:
    """A strategy, a file or a folder, imports no other, except a variant its parent: named in its first line."""
    folder = PACKAGE / "strategies"
    methods = {path.stem for path in folder.iterdir()} - {"__init__", "__pycache__", "strategy", "scheduler_step"}
    for path in sorted(folder.rglob("*.py")):
        me = path.relative_to(folder).with_suffix("").parts[0]
        names = [name.split(".") for name in imported(path.read_text(), path)]
        others = {parts[1] for parts in names if parts[0] == "strategies" and len(parts) > 1}
        siblings = others & methods - {me}
        first_line = (ast.get_docstring(tree_of(path.read_text())) or "").splitlines()[:1]
        if me != "__init__":
            assert all(name in "".join(first_line) for name in siblings), f"{path} imports {siblings}"


def test_one_communicator_to_the_other_ranks() -> None:
    others = [path for path in FILES if not any(is_in(dotted(path), prefix) for prefix in MAY_TALK_TO_RANKS)]
    assert [short(path) for path in others if mentions(path.read_text(), "torch.distributed")] == []


def test_no_hidden_state() -> None:
    sources = {path: path.read_text() for path in FILES}
    with_globals = [
        path for path in FILES if any(isinstance(node, ast.Global) for node in statements_in(sources[path]))
    ]
    assert with_globals == []
    names = ("os.environ", "os.getenv", "os.putenv")
    readers = [path for path in FILES if any(mentions(sources[path], name) for name in names)]
    assert [short(path) for path in readers if name_of(path) != "launch"] == []


def accelerators_named(source: str) -> list[str]:
    """Return the strings, modules of torch and questions of tensors by which a source names a type of accelerator."""
    nodes = nodes_of(source)
    texts = [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    attributes = [node for node in nodes if isinstance(node, ast.Attribute)]
    of_torch = [node.attr for node in attributes if isinstance(node.value, ast.Name) and node.value.id == "torch"]
    asked = [node.attr.removeprefix("is_") for node in attributes if node.attr.startswith("is_")]
    imports = (name.split(".") for name in names_imported(source, PACKAGE / "__init__.py"))
    modules = [name[1] for name in imports if name[0] == "torch" and len(name) > 1]
    return [name for name in texts + of_torch + asked + modules if name.partition(":")[0] in NAMES_OF_ACCELERATORS]


def test_one_module_knows_the_types_of_accelerators() -> None:
    others = [path for path in FILES if dotted(path) not in MAY_NAME_ACCELERATORS]
    assert [(short(path), names) for path in others if (names := accelerators_named(path.read_text()))] == []


def test_every_exception_names_an_accelerator() -> None:
    for module in MAY_NAME_ACCELERATORS:
        assert accelerators_named((PACKAGE / module.replace(".", "/")).with_suffix(".py").read_text()), module


def backends_named(source: str) -> list[str]:
    """Return the strings by which a source names a backend of torch.distributed."""
    texts = [node.value for node in nodes_of(source) if isinstance(node, ast.Constant)]
    return [text for text in texts if isinstance(text, str) and text in NAMES_OF_BACKENDS]


def test_few_modules_know_a_backend_by_name() -> None:
    named = {dotted(path): backends_named(path.read_text()) for path in FILES}
    assert {module for module, names in named.items() if names} == MAY_NAME_BACKENDS.keys()
    assert backends_named("if backend == 'nccl': ...") == ["nccl"]


def interceptions(source: str) -> set[str]:
    """Return by which means a source intercepts calls of torch functions or of modules."""
    nodes = nodes_of(source)
    names = {node.id for node in nodes if isinstance(node, ast.Name)}
    names |= {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    hooks = {"hook" for name in names if name.startswith(("register_forward", "register_module_forward"))}
    return hooks | {"mode" for name in names if name in ("TorchFunctionMode", "TorchDispatchMode")}


def test_torch_is_intercepted_in_few_modules() -> None:
    """Hooks go through HookSet, which removes them without a trace; a mode needs a reason of its own."""
    found = {dotted(path): interceptions(path.read_text()) for path in FILES}
    allowed = {module: means for module, (_, means) in MAY_INTERCEPT.items()}
    assert {module: means for module, means in found.items() if means} == allowed


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("from torch.overrides import TorchFunctionMode\nclass A(TorchFunctionMode): ...", {"mode"}),
        ("import torch\nclass A(torch.utils._python_dispatch.TorchDispatchMode): ...", {"mode"}),
        ("module.register_forward_pre_hook(hook)", {"hook"}),
        ("hooks.before(module, hook)", set()),
    ],
)
def test_the_interception_rule_sees(source: str, found: set[str]) -> None:
    assert interceptions(source) == found


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("if device.type == 'cuda': ...", ["cuda"]),
        ("f'cuda:{index}'", ["cuda:"]),
        ("import torch\ntorch.xpu.synchronize()", ["xpu"]),
        ("x.is_cuda", ["cuda"]),
        ("import torch.cuda", ["cuda"]),
        ("from torch import mps", ["mps"]),
        ("'such as cuda:1'", []),
        ("pipe.cuda()", []),
    ],
)
def test_the_accelerator_rule_sees(source: str, names: list[str]) -> None:
    assert accelerators_named(source) == names


def prints(source: str) -> bool:
    calls = [node.func for node in nodes_of(source) if isinstance(node, ast.Call)]
    return any(isinstance(call, ast.Name) and call.id == "print" for call in calls)


ONLY_ON_POSIX = {
    *("fcntl", "grp", "pwd", "resource", "syslog", "termios", "tty"),
    *("os.fork", "os.memfd_create", "os.register_at_fork", "os.O_NONBLOCK", "os.O_NOFOLLOW", "os.WNOHANG"),
    *("select.poll", "select.epoll", "select.POLLIN", "select.POLLOUT", "select.POLLHUP", "socket.AF_UNIX"),
    *(f"signal.SIG{name}" for name in ("CHLD", "CONT", "HUP", "KILL", "PIPE", "QUIT", "STOP", "USR1", "XFSZ")),
}


def posix_on_import(source: str) -> set[str]:
    """Modules, and names of modules, that Windows does not have, and that an import of this source needs."""
    found: set[str] = set()
    todo: list[ast.AST] = list(tree_of(source).body)
    while todo:
        node = todo.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue  # runs later, or never
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Attribute):
            found.add(ast.unparse(node))
        todo += ast.iter_child_nodes(node)
    return found & ONLY_ON_POSIX


def test_every_module_can_be_imported_on_windows() -> None:
    """One device and `Team` need nothing that Windows lacks: what only worker processes need is named where it runs."""
    found = {short(path): posix_on_import(path.read_text()) for path in FILES}
    assert {name: names for name, names in found.items() if names} == {}


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("import fcntl", {"fcntl"}),
        ("from signal import SIGKILL", {"signal.SIGKILL"}),
        ("class Worker:\n    ENDED = getattr(select, 'POLLRDHUP', select.POLLHUP)", {"select.POLLHUP"}),
        ("def f():\n    import fcntl\n    return signal.SIGKILL", set()),
        ("ENDED = getattr(signal, 'SIGHUP', None)", set()),
    ],
)
def test_the_windows_rule_sees(source: str, names: set[str]) -> None:
    assert posix_on_import(source) == names


def test_only_the_command_line_prints() -> None:
    assert [short(path) for path in FILES if name_of(path) != "cli" and prints(path.read_text())] == []
    assert prints("def f():\n    print(1)")


@pytest.mark.parametrize(
    ("source", "name", "seen"),
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
def test_the_communicator_rule_sees(source: str, name: str, seen: bool) -> None:
    assert mentions(source, name) == seen


def long_functions(source: str) -> list[str]:
    functions = [node for node in statements_in(source) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
    return [each.name for each in functions if (each.end_lineno or 0) - each.lineno >= MAX_FUNCTION_LINES]


def test_files_and_functions_stay_short() -> None:
    sources = {short(path): path.read_text() for path in FILES}
    assert {name: lines for name, text in sources.items() if (lines := len(text.splitlines())) > MAX_FILE_LINES} == {}
    assert {name: found for name, text in sources.items() if (found := long_functions(text))} == {}
    assert long_functions("def f():\n" + "    a = 1\n" * MAX_FUNCTION_LINES) == ["f"]


def test_names_say_what_is_inside() -> None:
    assert [short(path) for path in FILES if FORBIDDEN_NAMES & set(dotted(path).split("."))] == []


@pytest.mark.parametrize(("folder", "allowed"), [("pipelines", {"PUBLIC"}), ("app", THE_APP_MAY)])
def test_recipes_and_app_use_public_names(folder: str, allowed: set[str]) -> None:
    for path in sorted((REPOSITORY / folder).rglob("*.py")):
        names = imported(path.read_text(), path)
        wrong = [name for name in names if not any(is_in(name, prefix) for prefix in allowed)]
        assert not wrong, f"{path} reaches into the package"


def test_recipes_are_short() -> None:
    for path in sorted((REPOSITORY / "pipelines").glob("*.py")):
        assert len(path.read_text().splitlines()) <= 60, path.name


def classes_in_several_modules(sources: Mapping[str, str]) -> dict[str, list[str]]:
    """Names of classes, wherever they stand in a file, with the modules that define one of that name."""
    modules: dict[str, set[str]] = {}
    for module, source in sources.items():
        for node in statements_in(source):
            if isinstance(node, ast.ClassDef):
                modules.setdefault(node.name, set()).add(module)
    return {name: sorted(found) for name, found in modules.items() if len(found) > 1}


def test_no_class_name_in_two_modules() -> None:
    """A name in a docstring or a traceback says which class is meant, without its module."""
    files = [*FILES, *sorted((REPOSITORY / "app").rglob("*.py"))]
    sources = {
        str(path.relative_to(PACKAGE if path.is_relative_to(PACKAGE) else REPOSITORY)): path.read_text()
        for path in files
    }
    assert not classes_in_several_modules(sources)
    again = sources | {"plan/second.py": "def f():\n    class Mesh: ..."}
    assert classes_in_several_modules(again) == {"Mesh": ["plan/mesh.py", "plan/second.py"]}
