"""A transformer at work, watched: what its blocks are called with, and what reaches attention inside them.

While it is watched no token sees another: each attention call returns its queries. So whatever moves in a block when a
token is disturbed has come from that token, however deep the block.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_map_with_path

from patchpar.shard.hooks import HookSet
from patchpar.shard.sdpa import AttentionCall, SdpaMode, as_torch_lays
from patchpar.shard.transformer.token_mixing import MixingSevered

ASKED = ("query", "key", "value", "mask")


@dataclass(frozen=True, slots=True)
class CallArguments:
    """What a module is called with; leaves are named as its forward names them."""

    names: tuple[str, ...]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @classmethod
    def of(cls, module: nn.Module, args: Sequence[Any], kwargs: dict[str, Any]) -> "CallArguments":
        """The arguments of one call of `module`."""
        return cls(parameter_names(module), tuple(args), dict(kwargs))

    def _name(self, path: Any) -> str:
        which, first, *rest = path
        if which.idx == 1:
            return f"{first.key}{keystr(tuple(rest))}"
        name = self.names[first.idx] if first.idx < len(self.names) else f"argument {first.idx}"
        return f"{name}{keystr(tuple(rest))}"

    def leaves(self) -> dict[str, Any]:
        """Every leaf by its name."""
        found, _ = tree_flatten_with_path((self.args, self.kwargs))
        return {self._name(path): leaf for path, leaf in found}

    def tensors(self) -> dict[str, Tensor]:
        """The tensors among them."""
        return {name: leaf for name, leaf in self.leaves().items() if isinstance(leaf, Tensor)}

    def signature(self) -> tuple[str, ...]:
        """Which leaves there are, and of what sort: tells kinds of blocks apart."""
        return tuple(
            f"{name}: {f'{leaf.ndim} dims' if isinstance(leaf, Tensor) else type(leaf).__name__}"
            for name, leaf in self.leaves().items()
        )

    def map(self, change: Callable[[str, Any], Any]) -> "CallArguments":
        """The same with each leaf replaced."""
        args, kwargs = tree_map_with_path(lambda path, leaf: change(self._name(path), leaf), (self.args, self.kwargs))
        return CallArguments(self.names, args, kwargs)

    def cloned(self) -> "CallArguments":
        """The same with tensors of their own, whatever becomes of the others."""
        return self.map(lambda _, leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf)


def parameter_names(module: nn.Module) -> tuple[str, ...]:
    """Names of the positional parameters of a module's own forward, whatever is hooked to it."""
    return _parameters_of(type(module).forward)


@cache
def _parameters_of(forward: Callable[..., Any]) -> tuple[str, ...]:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = list(inspect.signature(forward).parameters.values())[1:]
    return tuple(each.name for each in parameters if each.kind in kinds)


@dataclass(slots=True)
class CapturedBlock:
    """The first call of a kind of block: item of the module list `name`, like those at the other `paths`."""

    name: str
    module: nn.Module
    arguments: CallArguments
    paths: list[str] = field(default_factory=list)
    attentions: int = 0


Kind = tuple[str, tuple[str, ...], tuple[str, ...]]  # module list, structure, signature


@dataclass(slots=True)
class CapturedRun:
    """What one run of the denoiser showed, by kind of block."""

    blocks: dict[Kind, CapturedBlock] = field(default_factory=dict)


def watch(denoiser: nn.Module, forward: Callable[..., Any], arguments: CallArguments) -> CapturedRun:
    """Run `forward` with attention severed and note how its blocks are called."""
    seen, mode = CapturedRun(), Severed()
    arguments = arguments.cloned()
    with _blocks_noted(denoiser, seen, mode), torch.no_grad(), mode:
        forward(*arguments.args, **arguments.kwargs)
    return seen


class Severed(SdpaMode):
    """Attention calls are noted, and answered by their queries; other calls go to `mixing`, if it is there."""

    def __init__(self, mixing: MixingSevered | None = None) -> None:
        super().__init__(self._answer, None if mixing is None else mixing.answer)
        self.calls: list[tuple[Tensor | None, ...]] = []
        self.keeping, self.count = True, 0

    def _answer(self, call: AttentionCall) -> Tensor:
        self.count += 1
        if self.keeping:
            self.calls.append((call.query, call.key, call.value, call.attn_mask))
        return as_torch_lays(resized(call.query, call.value.shape[-1]))


def resized(x: Tensor, width: int) -> Tensor:
    """A copy with as many numbers in the last dim: repeated, or left out."""
    repeats = -(-width // x.shape[-1])
    return x.repeat(*[1] * (x.ndim - 1), repeats)[..., :width].contiguous()


class _CaptureHooks:
    """Torch hooks that note how blocks are called; of blocks inside one another the outermost counts."""

    def __init__(self, seen: CapturedRun, mode: Severed) -> None:
        self.seen, self.mode = seen, mode
        self._inside: tuple[nn.Module, Kind, int] | None = None

    def entered(self, path: str, name: str) -> Callable[..., None]:
        """A hook before the forward of the block at `path`, of the list `name`."""

        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            if self._inside is not None:
                return
            arguments = CallArguments.of(module, args, kwargs)
            kind = (name, structure_of(module), arguments.signature())
            if kind not in self.seen.blocks:
                self.seen.blocks[kind] = CapturedBlock(name, module, arguments.cloned())
            paths = self.seen.blocks[kind].paths
            if path not in paths:
                paths.append(path)
            self._inside = (module, kind, self.mode.count)

        return hook

    def left(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """A hook after it."""
        if self._inside is not None and self._inside[0] is module:
            _, kind, before = self._inside
            self.seen.blocks[kind].attentions = self.mode.count - before
            self._inside = None


@contextmanager
def _blocks_noted(denoiser: nn.Module, seen: CapturedRun, mode: Severed) -> Iterator[None]:
    """Hooks on the items of every module list, for as long as the block runs."""
    mode.keeping, notes = False, _CaptureHooks(seen, mode)
    with HookSet() as hooks:
        for path, name, module in block_candidates(denoiser):
            hooks.before(module, notes.entered(path, name), with_kwargs=True)
            hooks.after(module, notes.left, with_kwargs=True)
        yield


def block_candidates(denoiser: nn.Module) -> Iterator[tuple[str, str, nn.Module]]:
    """(path, path of its list, module) of every item of every module list."""
    for name, module in denoiser.named_modules():
        if isinstance(module, nn.ModuleList):
            for number, item in enumerate(module):
                yield f"{name}.{number}", name, item


def structure_of(module: nn.Module) -> tuple[str, ...]:
    """What a block is made of; blocks of one list may differ."""
    return tuple(f"{path} {type(each).__qualname__}" for path, each in module.named_modules())
