"""Fixtures for kernels without a GPU: Triton's interpreter, its compiler for GPUs, and a count of launches.

interpreted(launch_x, *args)        what the kernel computes, by Triton's interpreter in a process of its own
launches(launch_x, *args)           every launch of the launcher: program, grid and arguments; nothing runs
compiled(launch)                    names of the stages the program of one launch was compiled to, for each architecture
"""

from __future__ import annotations

import importlib
import multiprocessing
import pkgutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from patchpar.comm.kernels import programs as programs_of_messages
from patchpar.comm.kernels.program import Program
from patchpar.shard.kernels import programs

ARCHITECTURES = (80, 90)  # A100, H100
POINTERS = {torch.float32: "*fp32", torch.float16: "*fp16", torch.bfloat16: "*bf16", torch.int8: "*i8"}
POINTERS |= {torch.int32: "*i32", torch.int64: "*i64", torch.uint8: "*u8", torch.bool: "*i1"}
OPTIONS = {"num_warps", "num_stages"}
WAIT = 250.0


class Launch(NamedTuple):
    program: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    options: dict[str, int]


@pytest.fixture(scope="session")
def interpreter(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessPoolExecutor]:
    """A process in which Triton interprets: it reads TRITON_INTERPRET when it decorates, its own library included."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("interpreted")))
        pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))
        assert pool.submit(_is_interpreting).result(WAIT)
    yield pool
    pool.shutdown(cancel_futures=True)


def _is_interpreting() -> bool:
    import triton

    torch.set_num_threads(1)
    return bool(triton.knobs.runtime.interpret)


@pytest.fixture
def interpreted(interpreter: ProcessPoolExecutor) -> Callable[..., Any]:
    return lambda launch, *args: interpreter.submit(launch, *args).result(WAIT)


class _Recorder:
    """Stands for a Triton program: notes its launches and runs nothing."""

    def __init__(self, program: Any, found: list[Launch]) -> None:
        self._program, self._found = program, found

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*args: Any, **kwargs: Any) -> None:
            options = {name: kwargs.pop(name) for name in OPTIONS & set(kwargs)}
            arguments = dict(zip(self._program.arg_names, args, strict=False)) | kwargs
            assert set(arguments) == set(self._program.arg_names), "every argument of the program once"
            self._found.append(Launch(self._program, tuple(grid), arguments, options))

        return launch


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Launch]]:
    from triton.runtime.jit import JITFunction

    found: list[Launch] = []

    def launched(of: Program, grid: Any, tensors: Any, numbers: Any = (), **constants: Any) -> None:
        of.first_launch(grid, *tensors, *numbers, **constants)

    monkeypatch.setattr(Program, "launch", launched)
    monkeypatch.setattr(Program, "launched_again", lambda *_: False)
    folders = (programs, programs_of_messages)
    names = [f"{folder.__name__}.{info.name}" for folder in folders for info in pkgutil.iter_modules(folder.__path__)]
    for module in map(importlib.import_module, names):
        for name, value in vars(module).copy().items():
            if isinstance(value, JITFunction) and not name.startswith("_"):  # those are parts of programs
                monkeypatch.setattr(module, name, _Recorder(value, found))

    def of(launch: Callable[..., Any], *args: Any) -> list[Launch]:
        del found[:]
        launch(*args)
        return list(found)

    return of


def _type_of(value: Any) -> Any:
    """The type of an argument as Triton names it; of a tuple, the types of its items."""
    if isinstance(value, tuple):
        return tuple(map(_type_of, value))
    if isinstance(value, Tensor):
        return POINTERS[value.dtype]
    if isinstance(value, bool):
        return "i1"
    if isinstance(value, int):
        return "i32" if -(2**31) <= value < 2**31 else "i64"
    assert isinstance(value, float), value
    return "fp32"


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., list[bytes]]:
    """Compiles the program of a launch for some architectures, all by default, without a GPU; returns the binaries."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))

    def binaries(launch: Launch, architectures: Sequence[int] = ARCHITECTURES) -> list[bytes]:
        parameters = {each.name: each for each in launch.program.params}
        fixed = {
            name: value for name, value in launch.arguments.items() if parameters[name].is_constexpr or value is None
        }
        types = {name: "constexpr" if name in fixed else _type_of(value) for name, value in launch.arguments.items()}
        source = ASTSource(fn=launch.program, signature=types, constexprs=fixed)
        return [
            triton.compile(source, target=GPUTarget("cuda", arch, 32), options=launch.options).asm["cubin"]
            for arch in architectures
        ]

    return binaries
