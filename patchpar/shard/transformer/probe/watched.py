"""Find the modules of a block whose functions must be intercepted: as few and as small as possible.

attention           none, where it is called as torch.nn.functional.scaled_dot_product_attention, which is replaced
                    there; else the module that calls it by another name
sums, convolutions  the modules that call those in which tokens meet
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from patchpar.shard.hooks import HookSet
from patchpar.shard.sdpa import AttentionCall, AttentionReplaced, SdpaMode
from patchpar.shard.transformer.probe.capture import CallArguments, severed
from patchpar.shard.transformer.token_mixing import ConvolutionCall, TokenMixing, is_sum
from patchpar.shard.transformer.token_plan import BlockPlan

ATTENTION, SUM, CONVOLUTION = "attention", "sum", "convolution"


@dataclass(frozen=True, slots=True)
class LocatedCall:
    """A call of a function in a block, in the module at `path`. `replaceable`: where torch.nn.functional holds it."""

    kind: str
    path: str
    replaceable: bool = False

    def is_in(self, modules: Sequence[str]) -> bool:
        """Whether it is made in one of the modules at these paths."""
        return any(_holds(path, self.path) for path in modules)


def with_watched_modules(plan: BlockPlan, module: nn.Module, arguments: CallArguments) -> BlockPlan:
    """Return the plan with the modules to intercept; its sums and convolutions are numbered among those in them."""
    calls = located_calls(module, arguments)
    mixing = plan.mixing or TokenMixing()
    needed = {
        SUM: set(mixing.sums),
        CONVOLUTION: {*mixing.convolutions, *mixing.frame_convolutions},
        ATTENTION: {number for number, call in enumerate(_of(calls, ATTENTION)) if not call.replaceable},
    }
    paths = {_of(calls, kind)[number].path for kind, numbers in needed.items() for number in numbers}
    modules = tuple(sorted(path for path in paths if not any(_holds(other, path) for other in paths - {path})))
    if plan.mixing is not None:
        plan = replace(plan, mixing=_numbered_in(plan.mixing, calls, modules))
    return replace(plan, watched=modules)


def _holds(outer: str, path: str) -> bool:
    return outer in ("", path) or path.startswith(f"{outer}.")


def _of(calls: Sequence[LocatedCall], kind: str) -> list[LocatedCall]:
    return [call for call in calls if call.kind == kind]


def _numbered_in(mixing: TokenMixing, calls: Sequence[LocatedCall], modules: Sequence[str]) -> TokenMixing:
    """Return the same calls, numbered among those that are made in `modules`."""

    def numbers(kind: str) -> Mapping[int, int]:
        inside = [number for number, call in enumerate(_of(calls, kind)) if call.is_in(modules)]
        return {number: position for position, number in enumerate(inside)}

    sums, convolutions = numbers(SUM), numbers(CONVOLUTION)
    return replace(
        mixing,
        sums=tuple(sums[number] for number in mixing.sums),
        convolutions=tuple(convolutions[number] for number in mixing.convolutions),
        frame_convolutions=tuple(convolutions[number] for number in mixing.frame_convolutions),
    )


def located_calls(module: nn.Module, arguments: CallArguments) -> list[LocatedCall]:
    """Run a block with attention severed, and return its calls of functions that may mix tokens, in their order."""
    located, arguments = _Location(), arguments.cloned()
    with torch.no_grad(), _followed(module, located), located, AttentionReplaced(located.by_name):
        module(*arguments.args, **arguments.kwargs)
    return located.calls


class _Location(SdpaMode):
    """A mode that notes in which module functions are called; `path` holds the paths of the running ones."""

    def __init__(self) -> None:
        super().__init__(self._attention, self._other)
        self.calls: list[LocatedCall] = []
        self.path = [""]
        self._replaceable = False

    def by_name(self, call: AttentionCall) -> Tensor:
        """Called for attention where torch.nn.functional holds it; torch's function is called in the mode then."""
        self._replaceable = True
        return call.run()

    def _attention(self, call: AttentionCall) -> Tensor:
        self.calls.append(LocatedCall(ATTENTION, self.path[-1], self._replaceable))
        self._replaceable = False
        return severed(call)

    def _other(self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if is_sum(func, args, kwargs):
            self.calls.append(LocatedCall(SUM, self.path[-1]))
        elif ConvolutionCall.of(func, args, kwargs) is not None:
            self.calls.append(LocatedCall(CONVOLUTION, self.path[-1]))
        return func(*args, **kwargs)


@contextmanager
def _followed(module: nn.Module, located: _Location) -> Iterator[None]:
    """Keep the paths of the modules that run, while open."""

    def leaving(*_: object) -> None:
        located.path.pop()

    with HookSet() as hooks:
        for path, part in module.named_modules():
            hooks.before(part, lambda *_, path=path: located.path.append(path))
            hooks.after(part, leaving)
        yield
