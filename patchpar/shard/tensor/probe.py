"""Run a block with some features of one part perturbed, and see which features of other parts change.

Every Linear but the perturbed one answers as in the first run, norms return what they get, and attention its queries.
So an effect ends at the next Linear, a norm mixes no features, and the features that a rank would hold show where they
go. Nothing is known of names: gates, fused projections and heads are seen as they move.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from patchpar.shard.hooks import HookSet
from patchpar.shard.tensor.feature_plan import Runs
from patchpar.shard.tensor.norms import is_norm
from patchpar.shard.transformer.probe.capture import ASKED, CallArguments, Severed
from patchpar.shard.transformer.probe.observe_block import output_tensors

LINEAR, NORM, ATTENTION = "linear", "norm", "attention"
HEADS = 1  # the dim of heads of what attention gets: [B, H, S, D]
Target = tuple[str, str]
"""Where features arrive: the input of a Linear or a norm at a path, or "0 query", "0 key", "0 value" of attention 0."""


@dataclass(slots=True)
class Observed:
    """One run of a block: what arrived at each target and what each Linear returned, of any shape, call by call."""

    targets: dict[Target, list[Tensor]] = field(default_factory=dict)
    outputs: dict[str, list[Tensor]] = field(default_factory=dict)
    results: dict[int, Tensor] = field(default_factory=dict)

    def note(self, target: Target, x: Tensor) -> None:
        """Keep a copy of x, of any shape, that arrives at `target`: the block may write into it afterwards."""
        self.targets.setdefault(target, []).append(x.clone())


@dataclass(frozen=True, slots=True)
class Moved:
    """What changed: features, or heads of attention, as a mask [F] by target; and whether the block's output did."""

    features: Mapping[Target, Tensor]
    output: bool


class FeatureProbe:
    """A block and one call of it."""

    def __init__(self, block: nn.Module, arguments: CallArguments) -> None:
        self.block, self.arguments = block, arguments
        self.linears = {path: part for path, part in block.named_modules() if isinstance(part, nn.Linear)}
        self.norms = {path: part for path, part in block.named_modules() if is_norm(part)}
        self.first = self._observe(None)

    def moved(self, source: str, runs: Runs) -> Moved:
        """Return what changes with the output features `runs` of the Linear, or those of the argument, `source`."""
        now = self._observe((source, runs))
        features = {}
        for target, before in self.first.targets.items():
            pairs = zip(before, now.targets.get(target, ()), strict=False)
            masks = [_changed(x, y, HEADS if target[0] == ATTENTION else -1) for x, y in pairs if x.shape == y.shape]
            if target != (LINEAR, source) and masks and bool((mask := torch.stack(masks).any(0)).any()):
                features[target] = mask
        results = self.first.results.items()
        return Moved(features, any(not torch.equal(x, now.results[number]) for number, x in results))

    def head_counts(self) -> list[int]:
        """Return the numbers of heads that reach attention, or that an attribute is named for, the smallest first."""
        seen = {x.shape[HEADS] for (kind, _), (x, *_) in self.first.targets.items() if kind == ATTENTION}
        named = (each for part in self.block.modules() for each in vars(part).items() if "heads" in each[0])
        return sorted(seen | {value for _, value in named if type(value) is int and value > 1})

    def _observe(self, perturbed: tuple[str, Runs] | None) -> Observed:
        seen, mode = Observed(), Severed()
        arguments = self.arguments.cloned()
        if perturbed is not None and perturbed[0] not in self.linears:
            source, runs = perturbed
            arguments = arguments.map(lambda name, leaf: _noisy(leaf, runs) if name == source else leaf)
        with torch.no_grad(), self._answered(seen, perturbed), mode:
            output = self.block(*arguments.args, **arguments.kwargs)
        for number, call in enumerate(mode.seen.calls):
            for what, x in zip(ASKED[:3], call[:3], strict=True):
                if x is not None and x.ndim == 4:
                    seen.note((ATTENTION, f"{number} {what}"), x)
        seen.results = output_tensors(output)
        return seen

    @contextmanager
    def _answered(self, seen: Observed, perturbed: tuple[str, Runs] | None) -> Iterator[None]:
        with HookSet() as hooks:
            for path, linear in self.linears.items():
                hooks.after(linear, partial(self._linear, seen, perturbed, path))
            for path, norm in self.norms.items():
                hooks.after(norm, partial(_identity, seen, path))
            yield

    def _linear(
        self, seen: Observed, perturbed: tuple[str, Runs] | None, path: str, _: nn.Module, args: Any, output: Tensor
    ) -> Tensor | None:
        """Called after a Linear has run."""
        seen.note((LINEAR, path), args[0])
        answers = seen.outputs.setdefault(path, [])
        if perturbed is None:
            answers.append(output.clone())
            return None
        first, number = self.first.outputs[path], len(answers)
        answers.append(output)
        answer = first[number].clone() if number < len(first) and first[number].shape == output.shape else output
        return _noisy(answer, perturbed[1]) if path == perturbed[0] else answer


def _identity(seen: Observed, path: str, _: nn.Module, args: Any, output: Tensor) -> Tensor | None:
    """Called after a norm has run."""
    seen.note((NORM, path), args[0])
    return args[0].to(output.dtype) if args[0].shape == output.shape else None


def _noisy(x: Tensor, runs: Runs) -> Tensor:
    """Return x [..., F] with the features `runs` perturbed by more than their size."""
    generator, noisy = torch.Generator().manual_seed(1), x.clone()
    for start, end in runs:
        part = noisy[..., start:end]
        noise = torch.randn(part.shape, generator=generator).to(part)
        noisy[..., start:end] = part + (1 + part.abs()) * noise
    return noisy


def _changed(before: Tensor, after: Tensor, dim: int) -> Tensor:
    """Return which indices along `dim` differ between two tensors of any shape."""
    others = [each for each in range(before.ndim) if each != dim % before.ndim]
    return (before != after).any(dim=others) if others else before != after
