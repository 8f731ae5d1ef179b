"""Launches of Triton programs, of which those after the first leave out what Triton does in each.

Triton binds, specialises and looks up the arguments of every launch, which takes longer than several of torch's own
operators. Where they are like those of an earlier launch, its compiled kernel runs at once: `kernel[grid](...)`, as
Triton's tutorials call it.
"""

from collections.abc import Callable, Hashable, Sequence
from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor

KERNELS_KEPT = 4096  # of arguments that differ in a type, an alignment or a number
ALIGNMENT = 16  # bytes: Triton compiles one kernel for pointers that are multiples of it, and one for others
LEAST_TRITON = (3, 3)
"""Triton from which programs take tuples, and compiled kernels the constants of their programs, in their order."""
Prepared = tuple[tuple[int, ...], tuple[Any, ...], dict[str, Any]]
"""The grid of a launch, the numbers after its tensors, and its constants."""
Compiled = tuple[Any, tuple[int, ...], tuple[Any, ...]]
"""A compiled kernel with its grid and all arguments: `kernel[grid](*arguments)` launches it again."""


class Program:
    """The Triton program `name` of a module, imported when it is first launched: Triton is not everywhere."""

    def __init__(self, module: str, name: str) -> None:
        self._module, self._name = module, name
        self._kernels: dict[Hashable, tuple[Any, tuple[int, ...], tuple[Any, ...]]] = {}  # with grid, last arguments

    def launch(
        self, grid: tuple[int, ...], tensors: tuple[Any, ...], numbers: tuple[Any, ...] = (), **constants: Any
    ) -> Compiled | None:
        """Launch it. `tensors`, of any shape, of its first parameters: also None, or tuples of tensors.

        `numbers` are of the next ones; `constants` of the others, and Triton's options. A kernel is known again by all
        of these, and by what Triton compiles it for of tensors. Returns what launches it again; None if that was the
        first launch.
        """
        first = tensors[0] if isinstance(tensors[0], Tensor) else tensors[0][0]
        facts = [grid, numbers, first.get_device(), *constants.values()]
        for x in tensors:  # as in `facts_of`, without a call in every launch
            if isinstance(x, Tensor):
                facts += (x.dtype, x.data_ptr() % ALIGNMENT)
            else:
                facts.append(x and facts_of(x))
        key = tuple(facts)
        known = self._kernels.get(key)
        if known is None:
            self.launch_for(key, numbers, grid, *tensors, **constants)
            return None
        kernel, whole_grid, last = known  # as `launched_again`, without a call in every launch
        values = *tensors, *last
        kernel[whole_grid](*values)
        return kernel, whole_grid, values

    def launch_by(
        self, prepare: Callable[..., Prepared], facts: tuple[Hashable, ...], tensors: tuple[Tensor | None, ...]
    ) -> None:
        """Launch it with `tensors`, of any shape, and what `prepare` returns for `facts`: it is called once for these.

        For operators whose grid and numbers take longer to compute than to look up. At least the first is a tensor.
        """
        first: Any = tensors[0]
        key = [facts, first.get_device()]
        for x in tensors:  # as in `facts_of`, without a call in every launch
            if x is None:
                key.append(None)
            else:
                key += (x.dtype, x.data_ptr() % ALIGNMENT)
        known = self._kernels.get(tuple(key))
        if known is None:
            grid, numbers, constants = prepare(*facts)
            self.launch_for(tuple(key), numbers, grid, *tensors, **constants)
            return
        kernel, whole_grid, last = known  # as `launched_again`, without a call in every launch
        kernel[whole_grid](*tensors, *last)

    def launched_again(self, key: Hashable, *args: Any) -> bool:
        """Launch the kernel that is known by `key`, and return whether one is. `args`: those that the key is not of."""
        known = self._kernels.get(key)
        if known is None:
            return False
        kernel, grid, last = known
        kernel[grid](*args, *last)
        return True

    def launch_for(
        self, key: Hashable, known: tuple[Any, ...], grid: tuple[int, ...], *args: Any, **constants: Any
    ) -> None:
        """Launch it, and know the kernel by `key` from now on, which determines the arguments `known` after `args`."""
        kernel = self.first_launch(grid, *args, *known, **constants)
        if hasattr(kernel, "packed_metadata") and runs_compiled():  # neither interpreted nor replaced
            if len(self._kernels) >= KERNELS_KEPT:
                self._kernels.clear()
            last = [constants[name] for name in self._program.arg_names[len(args) + len(known) :]]
            self._kernels[key] = kernel, (*grid, 1, 1)[:3], (*known, *last)

    def first_launch(self, grid: tuple[int, ...], *args: Any, **constants: Any) -> Any:
        """Launch it as Triton does, see `launch`. Returns the compiled kernel, if it was compiled."""
        return self._program[grid](*args, **constants)

    @property
    def _program(self) -> Any:
        return getattr(import_module(self._module), self._name)


def facts_of(tensors: Sequence[Tensor]) -> tuple[Any, ...]:
    """Return what Triton compiles a kernel for: dtype and alignment of tensors, of any shape."""
    facts = list[Any]()
    for x in tensors:
        facts += (x.dtype, x.data_ptr() % ALIGNMENT)
    return tuple(facts)


@cache
def runs_compiled() -> bool:
    """Whether compiled kernels are launched by themselves: those of NVIDIA, compiled for these facts of tensors."""
    found = triton_version()
    return torch.version.hip is None and found is not None and found >= LEAST_TRITON


@cache
def triton_version() -> tuple[int, int] | None:
    """Return the major and minor version of Triton; None where it is missing, or a build under another name."""
    try:
        numbers = version("triton").split(".")
    except PackageNotFoundError:
        return None
    return int(numbers[0]), int(numbers[1])
