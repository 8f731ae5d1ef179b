"""A block whose Linears hold some features: parameters are cut, sums over ranks are added after rows and in norms."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from diffusers.hooks import ModelHook
from torch import Tensor, nn
from torch.nn import functional as F

from patchpar.shard.hooks import HookSet
from patchpar.shard.tensor.feature_plan import BlockCut, FeatureCut
from patchpar.shard.tensor.norms import normalized, sums_of
from patchpar.shard.transformer.probe.capture import CallArguments

HOOK = "patchpar_features"
Sum = Callable[[str, Tensor], Tensor]
"""Adds up a tensor of any shape over all ranks; it is given at a path in the block."""
Join = Callable[[FeatureCut, Tensor, int], Tensor]
"""Returns the whole of a parameter [..., f, ...] that is cut along a dim: [..., F, ...]."""


class CutBlock:
    """A block that computes with the features of `rank`, until `restore`. `add_up` is called in the order it runs.

    Its whole parameters are kept until `settle`: up to then `undo` puts them back, without other ranks.
    """

    def __init__(self, block: nn.Module, cut: BlockCut, rank: int, add_up: Sum) -> None:
        self.block, self.cut, self.rank = block, cut, rank
        self._hooks = HookSet()
        self._parameters: list[tuple[nn.Parameter, FeatureCut, int]] = []
        self._before: list[Tensor] = []  # of these
        try:
            self._install(add_up)
        except BaseException:
            self.undo()
            raise

    def _install(self, add_up: Sum) -> None:
        for column in self.cut.columns:
            self._cut_column(column)
        for row in self.cut.rows:
            self._cut_row(row, partial(add_up, row.path))
        for norm in self.cut.norms:
            self._cut_norm(norm, partial(add_up, norm.path))
        for count in self.cut.counts:
            self._hooks.replace(self.block.get_submodule(count.path), count.name, count.values[self.rank])
        if self.cut.arguments:
            self._hooks.install(self.block, _ArgumentHook(self.cut.arguments, self.rank), HOOK)

    def settle(self) -> None:
        """Free the whole parameters."""
        self._before.clear()

    def undo(self) -> None:
        """Put the whole parameters back, and remove the hooks."""
        for (parameter, _, _), before in zip(reversed(self._parameters), reversed(self._before), strict=True):
            parameter.data = before
        self._parameters.clear()
        self._before.clear()
        self._hooks.close()

    def missing_bytes(self) -> int:
        """Return the bytes by which the parameters grow in `restore`."""
        return sum(
            parameter.nbytes * sum(cut.sizes()) // parameter.shape[dim] - parameter.nbytes
            for parameter, cut, dim in self._parameters
        )

    def restore(self, whole: Join) -> None:
        """Make all parameters whole again, in the memory that `whole` returns, and remove the hooks. Idempotent.

        Where `whole` fails it can be called again, for the rest.
        """
        while self._parameters:
            parameter, cut, dim = self._parameters[-1]
            with torch.inference_mode(mode=False):
                parameter.data = whole(cut, parameter.data, dim)
            self._parameters.pop()
        self._hooks.close()

    def _cut_column(self, column: FeatureCut) -> None:
        linear = self.block.get_submodule(column.path)
        self._narrow(linear.weight, column, 0)
        self._narrow(linear.bias, column, 0)
        self._hooks.replace(linear, "out_features", column.sizes()[self.rank])

    def _cut_row(self, row: FeatureCut, add_up: Callable[[Tensor], Tensor]) -> None:
        linear = self.block.get_submodule(row.path)
        self._narrow(linear.weight, row, 1)
        self._hooks.replace(linear, "in_features", row.sizes()[self.rank])
        self._hooks.install(linear, _RowHook(add_up), HOOK)

    def _cut_norm(self, norm: FeatureCut, add_up: Callable[[Tensor], Tensor]) -> None:
        module = self.block.get_submodule(norm.path)
        for name in ("weight", "bias"):
            self._narrow(getattr(module, name, None), norm, 0)
        self._hooks.install(module, _NormHook(add_up, sum(norm.sizes())), HOOK)

    def _narrow(self, parameter: Any, cut: FeatureCut, dim: int) -> None:
        if parameter is not None:
            before = parameter.data
            with torch.inference_mode(mode=False):
                parameter.data = cut.part(before, dim, self.rank)
            self._parameters.append((parameter, cut, dim))
            self._before.append(before)


class _RowHook(ModelHook):  # type: ignore[misc]  # diffusers is not typed
    """Adds up the outputs of a Linear that has some input features, and then its bias."""

    def __init__(self, add_up: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.add_up = add_up

    def new_forward(self, module: nn.Linear, x: Tensor) -> Tensor:
        """Replaces the Linear's forward, for x [..., f]."""
        out = self.add_up(F.linear(x, module.weight))
        return out if module.bias is None else out + module.bias.to(out.dtype)  # another one within autocast


class _NormHook(ModelHook):  # type: ignore[misc]
    """A norm over `features` features, of which the module gets some."""

    def __init__(self, add_up: Callable[[Tensor], Tensor], features: int) -> None:
        super().__init__()
        self.add_up, self.features = add_up, features

    def new_forward(self, module: nn.Module, x: Tensor) -> Tensor:
        """Replaces the norm's forward, for x [..., f]."""
        return normalized(module, x, self.add_up(sums_of(module, x)), self.features)


class _ArgumentHook(ModelHook):  # type: ignore[misc]
    """Passes a block some features of its arguments."""

    def __init__(self, arguments: tuple[FeatureCut, ...], rank: int) -> None:
        super().__init__()
        self.arguments, self.rank = {each.path: each for each in arguments}, rank

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Called before the block runs."""
        own = CallArguments.of(module, args, kwargs).map(self._own)
        return own.args, own.kwargs

    def _own(self, name: str, leaf: Any) -> Any:
        cut = self.arguments.get(name)
        return leaf if cut is None or not isinstance(leaf, Tensor) else cut.part(leaf, leaf.ndim - 1, self.rank)
