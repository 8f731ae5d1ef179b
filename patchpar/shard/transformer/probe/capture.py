"""Record a run of a transformer: the arguments of its blocks, and what reaches attention inside them.

During the run attention is severed: each call returns its queries, so that no token affects another. Whatever changes
in a block when a token is perturbed then comes from that token, however deep the block.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_map_with_path

from patchpar.shard.hooks import HookSet
from patchpar.shard.module_tree import named_modules_of
from patchpar.shard.sdpa import AttentionCall, SdpaMode, as_torch_lays
from patchpar.shard.transformer.token_mixing import MixingSevered

ASKED = ("query", "key", "value", "mask")


@dataclass(frozen=True, slots=True)
class CallArguments:
    """The arguments of a module's call; leaves are named by the parameters of its forward."""

    names: tuple[str, ...]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @classmethod
    def of(cls, module: nn.Module, args: Sequence[Any], kwargs: dict[str, Any]) -> "CallArguments":
        """Return the arguments of one call of `module`."""
        return cls(parameter_names(module), tuple(args), dict(kwargs))

    def _name(self, path: Any) -> str:
        which, first, *rest = path
        if which.idx == 1:
            return f"{first.key}{keystr(tuple(rest))}"
        name = self.names[first.idx] if first.idx < len(self.names) else f"argument {first.idx}"
        return f"{name}{keystr(tuple(rest))}"

    def leaves(self) -> dict[str, Any]:
        """Return every leaf by its name."""
        found, _ = tree_flatten_with_path((self.args, self.kwargs))
        return {self._name(path): leaf for path, leaf in found}

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors among the leaves, of any shape, by name."""
        return {name: leaf for name, leaf in self.leaves().items() if isinstance(leaf, Tensor)}

    def signature(self) -> tuple[str, ...]:
        """Return the name and type of each leaf: it distinguishes kinds of blocks."""
        return tuple(
            f"{name}: {f'{leaf.ndim} dims' if isinstance(leaf, Tensor) else type(leaf).__name__}"
            for name, leaf in self.leaves().items()
        )

    def map(self, change: Callable[[str, Any], Any]) -> "CallArguments":
        """Return the same arguments with each leaf replaced by `change(name, leaf)`."""
        args, kwargs = tree_map_with_path(lambda path, leaf: change(self._name(path), leaf), (self.args, self.kwargs))
        return CallArguments(self.names, args, kwargs)

    def cloned(self) -> "CallArguments":
        """Return the same arguments with copies of the tensors."""
        return self.map(lambda _, leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf)

    def passed_to(self, forward: Callable[..., Any]) -> Any:
        """Call `forward` with copies of the arguments: a model may change them in place."""
        own = self.cloned()
        return forward(*own.args, **own.kwargs)


def parameter_names(module: nn.Module) -> tuple[str, ...]:
    """Return the names of the positional parameters of a module's own forward, ignoring hooks."""
    return _parameters_of(type(module).forward)


@cache
def _parameters_of(forward: Callable[..., Any]) -> tuple[str, ...]:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = list(inspect.signature(forward).parameters.values())[1:]
    return tuple(each.name for each in parameters if each.kind in kinds)


@dataclass(slots=True)
class CapturedBlock:
    """The first call of a kind of block: an item of the module list `name`, like those at the other `paths`."""

    name: str
    module: nn.Module
    arguments: CallArguments
    paths: list[str] = field(default_factory=list)
    attentions: int = 0


Kind = tuple[str, tuple[str, ...], tuple[str, ...]]  # module list, structure, signature
CapturedRun = dict[Kind, CapturedBlock]  # the blocks of one run of the denoiser


def watch(denoiser: nn.Module, forward: Callable[..., Any], arguments: CallArguments) -> CapturedRun:
    """Run `forward` with attention severed and record how its blocks are called."""
    seen, mode = CapturedRun(), Severed()
    arguments = arguments.cloned()
    with _blocks_noted(denoiser, seen, mode), torch.no_grad(), mode:
        forward(*arguments.args, **arguments.kwargs)
    return seen


class AttentionCalls:
    """Attention calls that are answered with their queries: how many, and, if `keeping`, their tensors."""

    def __init__(self) -> None:
        self.calls: list[tuple[Tensor | None, ...]] = []
        self.keeping, self.count = True, 0

    def answer(self, call: AttentionCall) -> Tensor:
        """Return the output [B, N, q, E] of a call."""
        self.count += 1
        if self.keeping:
            self.calls.append((call.query, call.key, call.value, call.attn_mask))
        return severed(call)


class Severed(SdpaMode):
    """A mode that records attention calls and returns their queries; other calls go to `mixing`, if given.

    `seen` does not know the mode: in a cycle its tensors would stay in memory until garbage is collected.
    """

    def __init__(self, mixing: MixingSevered | None = None) -> None:
        self.seen = AttentionCalls()
        super().__init__(self.seen.answer, None if mixing is None else mixing.answer)


def severed(call: AttentionCall) -> Tensor:
    """Return the queries of a call as its output [B, N, q, E]."""
    return as_torch_lays(resized(call.query, call.value.shape[-1]))


def resized(x: Tensor, width: int) -> Tensor:
    """Return a copy [..., width] of x [..., D]: its last dim repeated or cut to `width` elements."""
    repeats = -(-width // x.shape[-1])
    return x.repeat(*[1] * (x.ndim - 1), repeats)[..., :width].contiguous()


class _CaptureHooks:
    """Torch hooks that record how blocks are called; of nested blocks the outermost."""

    def __init__(self, seen: CapturedRun, attended: AttentionCalls) -> None:
        self.seen, self.attended = seen, attended
        self._inside: tuple[nn.Module, Kind, int] | None = None

    def entered(self, path: str, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        """The pre-forward hook of the block at `path`, of the list `name`."""
        if self._inside is not None:
            return
        arguments = CallArguments.of(module, args, kwargs)
        kind = (name, structure_of(module), arguments.signature())
        if kind not in self.seen:
            self.seen[kind] = CapturedBlock(name, module, arguments.cloned())
        paths = self.seen[kind].paths
        if path not in paths:
            paths.append(path)
        self._inside = (module, kind, self.attended.count)

    def left(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """The forward hook of a block."""
        if self._inside is not None and self._inside[0] is module:
            _, kind, before = self._inside
            self.seen[kind].attentions = self.attended.count - before
            self._inside = None


@contextmanager
def _blocks_noted(denoiser: nn.Module, seen: CapturedRun, mode: Severed) -> Iterator[None]:
    """Hook the items of every module list while open."""
    mode.seen.keeping, notes = False, _CaptureHooks(seen, mode.seen)
    with HookSet() as hooks:
        for path, name, module in block_candidates(denoiser):
            hooks.before(module, partial(notes.entered, path, name), with_kwargs=True)
            hooks.after(module, notes.left, with_kwargs=True)
        yield


def block_candidates(denoiser: nn.Module) -> Iterator[tuple[str, str, nn.Module]]:
    """Yield (path, path of its list, module) of every item of every module list."""
    for name, module in named_modules_of(denoiser):
        if isinstance(module, nn.ModuleList):
            for number, item in enumerate(module):
                yield f"{name}.{number}", name, item


def structure_of(module: nn.Module) -> tuple[str, ...]:
    """Return the classes of a block's submodules; blocks of one list may differ."""
    return tuple(f"{path} {type(each).__qualname__}" for path, each in module.named_modules())
