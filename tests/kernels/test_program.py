"""Launches after the first run the compiled kernel at once, with what Triton would give it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from patchpar.comm.kernels import program
from patchpar.comm.kernels.program import Prepared, Program

SELF = "tests.kernels.test_program"


class Compiled:
    """A compiled kernel, of what it was compiled for; notes how it is launched."""

    packed_metadata = ()

    def __init__(self, launched: list[tuple[Any, ...]]) -> None:
        self._launched = launched

    def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., None]:
        return lambda *args: self._launched.append((grid, *args))


class Triton:
    """A program with parameters x, y, size, WIDTH and ROWS, as Triton's JITFunction."""

    arg_names = ("x", "y", "size", "WIDTH", "ROWS")

    def __init__(self) -> None:
        self.compiled, self.launched = 0, list[tuple[Any, ...]]()

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Compiled]:
        def run(*_: Any, **__: Any) -> Compiled:
            self.compiled += 1
            return Compiled(self.launched)

        return run


some_program = Triton()


@pytest.fixture
def triton(monkeypatch: pytest.MonkeyPatch) -> Triton:
    found = Triton()
    monkeypatch.setitem(globals(), "some_program", found)
    monkeypatch.setattr(program, "runs_compiled", lambda: True)
    return found


def launch(of: Program, x: torch.Tensor, y: Any, size: Any = 7, *, width: int = 8) -> None:
    of.launch((3, 2), (x, y), (size,), num_warps=8, ROWS=4, WIDTH=width)


def test_a_second_launch_gives_the_kernel_all_arguments_in_the_order_of_its_parameters(triton: Triton) -> None:
    of, x, y = Program(SELF, "some_program"), torch.zeros(8), (torch.zeros(4), torch.zeros(4))
    launch(of, x, y)
    assert (triton.compiled, triton.launched) == (1, [])
    launch(of, x, y)
    assert triton.compiled == 1
    ((grid, *args),) = triton.launched
    assert grid == (3, 2, 1)
    assert args[0] is x
    assert args[1] is y
    assert args[2:] == [7, 8, 4]


def test_what_triton_may_compile_another_kernel_for_is_launched_by_triton(triton: Triton) -> None:
    of, x = Program(SELF, "some_program"), torch.zeros(64)
    others: list[tuple[Any, ...]] = [
        (x, x),
        (x.half(), x),  # dtype
        (x[1:], x),  # alignment
        (x, None),
        (x, (x,)),
        (x, (x[1:],)),  # alignment in a tuple
        (x, x, 16),  # a multiple of 16
        (x, x, (1, 2)),
        (x, x, (1, 3)),
    ]
    for number, args in enumerate(others, 1):
        launch(of, *args)
        assert triton.compiled == number, args
    launch(of, x, x, width=16)  # a constant
    assert triton.compiled == len(others) + 1
    assert not triton.launched
    for args in others:
        launch(of, *args)
    assert len(triton.launched) == len(others), "control: each is known now"


def test_what_facts_determine_is_prepared_for_the_first_launch_only(triton: Triton) -> None:
    of, x, y, prepared = Program(SELF, "some_program"), torch.zeros(64), torch.zeros(64), list[int]()

    def prepare(size: int, width: int) -> Prepared:
        prepared.append(size)
        return (size, 2), (size,), {"num_warps": 8, "ROWS": 4, "WIDTH": width}

    of.launch_by(prepare, (7, 8), (x, y))
    assert (triton.compiled, triton.launched) == (1, [])
    of.launch_by(prepare, (7, 8), (x, None))
    of.launch_by(prepare, (7, 8), (x, y))
    assert triton.launched == [((7, 2, 1), x, y, 7, 8, 4)]
    others: list[Any] = [((7, 8), (x[1:], y)), ((7, 8), (x, y[1:])), ((7, 8), (x, y.half())), ((7, 9), (x, y))]
    for number, args in enumerate(others, 3):
        of.launch_by(prepare, *args)
        assert triton.compiled == len(prepared) == number, args
    for args in others:
        of.launch_by(prepare, *args)
    assert len(triton.launched) == 1 + len(others), "control: each is known now"
    assert len(prepared) == 2 + len(others)


def test_elsewhere_every_launch_is_by_triton(triton: Triton, monkeypatch: pytest.MonkeyPatch) -> None:
    """AMD compiles for other facts, and kernels of an old Triton take other arguments."""
    monkeypatch.setattr(program, "runs_compiled", lambda: False)
    of, x = Program(SELF, "some_program"), torch.zeros(8)
    for number in (1, 2):
        launch(of, x, x)
        assert triton.compiled == number


def test_interpreted_programs_have_no_kernel(triton: Triton, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Program, "first_launch", lambda *_, **__: None)
    of, x = Program(SELF, "some_program"), torch.zeros(8)
    launch(of, x, x)
    launch(of, x, x)
    assert not triton.launched
