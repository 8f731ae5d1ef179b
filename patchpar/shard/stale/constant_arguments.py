"""Arguments of a denoiser that are the same tensors in every step, such as a text: with others it is another call."""

from collections.abc import Hashable
from typing import Any
from weakref import ref

from torch import Tensor

_Argument = tuple["ref[Tensor]", bool]  # of the last evaluation, and whether it was that of the one before too


class ConstantArguments:
    """The tensors that each call of a step has been given so far, known by identity: values are not read.

    A pipeline may call the denoiser without the prompt and then with it, and in later steps with it alone: the first
    call of the step is then another one. Programs are the same on all ranks, and so is what is found.
    """

    def __init__(self) -> None:
        self._last: dict[int, dict[Hashable, _Argument]] = {}

    def have_changed(self, call: int, arguments: tuple[Any, Any]) -> bool:
        """Whether an argument that was the same tensor in the last two evaluations of a call is another one now.

        `arguments`: args and kwargs, of which tensors and lists of tensors count. In every denoiser call, so that it
        makes no further calls of Python.
        """
        args, kwargs = arguments
        found: list[tuple[Hashable, Any]] = [*enumerate(args), *kwargs.items()]
        for path, x in found.copy():
            if isinstance(x, list):
                for number, each in enumerate(x):
                    found.append(((path, number), each))
        last, now, changed = self._last.get(call, {}), dict[Hashable, _Argument](), False
        for path, x in found:
            if isinstance(x, Tensor):
                before = last.get(path)
                is_same = before is not None and before[0]() is x
                changed |= before is not None and before[1] and not is_same
                now[path] = ref(x), is_same
        self._last[call] = now
        return changed

    def reset(self) -> None:
        """Begin an image."""
        self._last.clear()
