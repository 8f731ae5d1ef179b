"""The feature plan of a transformer: which rank holds which features of its Linears. Found once, printable, in JSON.

    column      a Linear of which a rank holds some output features, so that it needs all input features
    row         a Linear of which a rank holds some input features; its outputs are added up over the ranks
    norm        a norm over all features of which a rank holds some; its moments are added up over the ranks
    argument    a tensor argument of the block, such as a rotary table, of which a rank needs some features
    count       an integer attribute by which the code divides features into heads

Columns and rows are those of Megatron-LM (Shoeybi et al. 2019, arXiv:1909.08053).
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from patchpar.plan.dataclass_json import decoded
from patchpar.plan.json_files import object_of

Runs = tuple[tuple[int, int], ...]
"""Features from the first of each pair up to, but without, the second."""


@dataclass(frozen=True, slots=True)
class FeatureCut:
    """The features of each rank, of a part of a block at `path` or of its argument of that name."""

    path: str
    runs: tuple[Runs, ...]

    def part(self, x: Tensor, dim: int, rank: int) -> Tensor:
        """Return a copy of a rank's features of x [..., F, ...], which has all along `dim`: [..., f, ...]."""
        return torch.cat([x.narrow(dim, start, end - start) for start, end in self.runs[rank]], dim)

    def whole(self, parts: Sequence[Tensor], dim: int) -> Tensor:
        """Return all features from the parts of all ranks, [..., f, ...] each along `dim`: [..., F, ...]."""
        pieces = []
        for runs, part in zip(self.runs, parts, strict=True):
            sizes = [end - start for start, end in runs]
            pieces += list(zip(runs, torch.split(part, sizes, dim), strict=True))
        return torch.cat([piece for _, piece in sorted(pieces, key=lambda each: each[0])], dim)

    def sizes(self) -> list[int]:
        """Return the number of features of each rank."""
        return [sum(end - start for start, end in runs) for runs in self.runs]


@dataclass(frozen=True, slots=True)
class Count:
    """An attribute of the part of a block at `path`, and its value on each rank."""

    path: str
    name: str
    values: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockCut:
    """How blocks of one kind are cut: those at `paths`, of the class `kind`, in the module list `name`.

    `fraction`: of the blocks' weights that is divided between the ranks.
    """

    name: str
    kind: str
    paths: tuple[str, ...]
    columns: tuple[FeatureCut, ...]
    rows: tuple[FeatureCut, ...]
    norms: tuple[FeatureCut, ...] = ()
    arguments: tuple[FeatureCut, ...] = ()
    counts: tuple[Count, ...] = ()
    fraction: float = 0.0

    def __str__(self) -> str:
        what = [f"{self.name}, {len(self.paths)} x {self.kind}: {self.fraction:.0%} of the weights divided"]
        for title in ("columns", "rows", "norms", "arguments"):
            if paths := [each.path for each in getattr(self, title)]:
                what.append(f"  {title:<11}{', '.join(paths)}")
        return "\n".join(what)


@dataclass(frozen=True, slots=True, kw_only=True)
class FeaturePlan:
    """How the blocks of a transformer are cut for `size` ranks. `refused`: the reason for each kind that is not."""

    denoiser: str
    size: int
    blocks: tuple[BlockCut, ...]
    refused: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "\n".join([*map(str, self.blocks), *(f"{each} (whole on every rank)" for each in self.refused)])

    def to_json(self) -> str:
        """Return the plan as text, the same for equal plans."""
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> "FeaturePlan":
        """Parse the text of `to_json`. Raises ValueError, KeyError or TypeError for anything else."""
        return decoded(cls, object_of(text, "a feature plan"))
