"""Find which features of a block each rank can hold, by perturbing them: columns, rows, norms and arguments.

    1. column       perturb the features of one rank after the other: what they reach must differ from rank to rank
    2. row          a Linear all of whose input features are reached from exactly one rank each
    3. drop         columns whose row is none, or whose attention has a query, key or value that is not of a column
    4. counts       integer attributes by which the code divides features into heads: a rank that holds some has fewer;
                    those whose values are numbers of heads, or of features of a column, are tried
    5. proof        run the block as each rank would, see `proof`

Features may lie in pieces (a gate beside its values, queries beside keys), of each of which a rank has a run of units
(heads, or single features); shares may be uneven.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from patchpar.errors import UnsupportedModel
from patchpar.shard.tensor.feature_plan import BlockCut, Count, FeatureCut, Runs
from patchpar.shard.tensor.probe import ATTENTION, LINEAR, NORM, FeatureProbe, Target
from patchpar.shard.tensor.proof import BlockProof
from patchpar.shard.transformer.probe.capture import CapturedBlock
from patchpar.shard.unsupported_model import attempted, reason_of

MOST_PIECES = 12
_NAMES = ((), ("head",), ("head", "inner", "hidden", "embed", "dim"))
"""Parts of names of counts, the likeliest first, for one attempt after the other: the proof decides."""
Masks = list[Tensor]  # [F] each, by rank


@dataclass(frozen=True, slots=True)
class Source:
    """Features that can be divided, and what those of each rank reach."""

    cut: FeatureCut
    reached: Mapping[Target, Masks]


def find_cut(block: CapturedBlock, size: int) -> BlockCut:
    """Return how blocks of that kind are cut for `size` ranks, proved on one call. Raises UnsupportedModel.

    Where all columns together are not right, those are taken that are right by themselves.
    """
    search = FeatureSearch(FeatureProbe(block.module, block.arguments), size)
    columns = search.columns()
    if not columns:
        raise UnsupportedModel("no Linear has output features that can be divided")
    try:
        return search.proved(block, columns)
    except UnsupportedModel:
        groups = connected(columns)
        if len(groups) == 1:
            raise
    right: dict[str, Source] = {}
    reasons = []
    for group in groups:
        try:
            search.proved(block, group)
            right |= group
        except UnsupportedModel as error:
            reasons.append(str(error))
    if not right:
        raise UnsupportedModel("; ".join(dict.fromkeys(reasons)))
    return search.proved(block, right)


def connected(columns: Mapping[str, Source]) -> list[dict[str, Source]]:
    """Return the columns in groups that reach nothing in common, no attention either, without groups of arguments."""
    groups: list[tuple[set[Target], dict[str, Source]]] = []
    for path, source in columns.items():
        targets, members = {(kind, where.split()[0]) for kind, where in source.reached}, {path: source}
        for other in [each for each in groups if each[0] & targets]:
            groups.remove(other)
            targets, members = targets | other[0], other[1] | members
        groups.append((targets, members))
    return [members for _, members in groups]


class FeatureSearch:
    """The search in one kind of block."""

    def __init__(self, probe: FeatureProbe, size: int) -> None:
        self.probe, self.size = probe, size

    def columns(self) -> dict[str, Source]:
        """Return the Linears, and arguments of the block, whose features can be divided, by path or name."""
        found: dict[str, Source] = {}
        for path, linear in self.probe.linears.items():
            source = self._source(path, linear.out_features) if self._may_be_cut(path) else None
            if source is not None:
                found[path] = source
        for name, x in self.probe.arguments.tensors().items():
            if x.ndim > 1 and x.is_floating_point() and x.shape[-1] >= self.size:
                source = self._source(name, x.shape[-1])
                if source is not None and any(kind == ATTENTION for kind, _ in source.reached):
                    found[name] = source
        while dropped := self._without_end(found):
            found = {path: source for path, source in found.items() if path not in dropped}
        return found if any(path in self.probe.linears for path in found) else {}

    def proved(self, block: CapturedBlock, columns: Mapping[str, Source]) -> BlockCut:
        """Return the cut by these columns, with the counts with which it is right. Raises UnsupportedModel."""
        cut, proof, failures = self.cut(block, columns), BlockProof(block, self.size), list[Exception]()
        for counts in count_choices(block.module, cut.columns, self.probe.head_counts()):
            chosen = replace(cut, counts=counts)
            with attempted(failures):
                proof.check(chosen)
                return chosen
        raise UnsupportedModel(f"divided, it does not compute the same ({reason_of(failures[-1])})")

    def cut(self, block: CapturedBlock, columns: Mapping[str, Source]) -> BlockCut:
        """Return the cut by these columns."""
        linears, rows = self.probe.linears, self._reached(columns, LINEAR)
        own = [source.cut for path, source in columns.items() if path in linears]
        divided = {*(each.path for each in own), *rows}
        weights = sum(linears[path].weight.numel() for path in divided)
        return BlockCut(
            name=block.name,
            kind=type(block.module).__name__,
            paths=tuple(block.paths),
            columns=tuple(own),
            rows=tuple(_cut_of(path, masks) for path, masks in rows.items()),
            norms=tuple(_cut_of(path, masks) for path, masks in self._reached(columns, NORM).items()),
            arguments=tuple(source.cut for path, source in columns.items() if path not in linears),
            fraction=round(weights / sum(p.numel() for p in block.module.parameters()), 4),
        )

    def _source(self, path: str, features: int) -> Source | None:
        """Return the source at `path`, divided so that no two ranks reach the same; None if there is no way."""
        every = self.probe.moved(path, ((0, features),))
        if every.output or not every.features:
            return None
        for runs in partitions(features, self.size, self.probe.head_counts()):
            reached: dict[Target, Masks] = {}
            for number, own in enumerate(runs):
                for target, mask in self.probe.moved(path, own).features.items():
                    masks = reached.setdefault(target, [torch.zeros_like(mask) for _ in range(self.size)])
                    masks[number] = mask
            reached = {target: masks for target, masks in reached.items() if not _is_local_norm(target, masks)}
            if reached and not any(_overlap(masks) for masks in reached.values()):
                return Source(FeatureCut(path, runs), reached)
        return None

    def _without_end(self, columns: Mapping[str, Source]) -> set[str]:
        """Return the columns to drop: those that reach what cannot be divided like them."""
        reached = {kind: self._reached(columns, kind) for kind in (LINEAR, NORM, ATTENTION)}
        bad = {
            (kind, path)
            for kind in (LINEAR, NORM)
            for path, masks in reached[kind].items()
            if not bool((torch.stack(masks).sum(0) == 1).all())
        }
        bad |= {(LINEAR, path) for path in reached[LINEAR] if not self._may_be_cut(path)}
        dropped = set()
        for path in reached[LINEAR].keys() & columns.keys():  # both a row and a column: what attention, or more, needs
            linear = self.probe.linears[path]
            asked = any(kind == ATTENTION for kind, _ in columns[path].reached)
            if asked or linear.out_features > linear.in_features:
                bad.add((LINEAR, path))
            else:
                dropped.add(path)
        numbers = {target.split()[0] for target in reached[ATTENTION]}
        whole = {number for number in numbers if not all((f"{number} {what}") in reached[ATTENTION] for what in _QKV)}
        bad |= {(ATTENTION, target) for target in reached[ATTENTION] if target.split()[0] in whole}
        return dropped or {path for path, source in columns.items() if source.reached.keys() & bad}

    def _may_be_cut(self, path: str) -> bool:
        return path in self.probe.first.outputs and is_plain(self.probe.linears[path])

    def _reached(self, columns: Mapping[str, Source], kind: str) -> dict[str, Masks]:
        """Return what each rank's features reach together, by path."""
        found: dict[str, Masks] = {}
        for source in columns.values():
            for (each, path), masks in source.reached.items():
                if each == kind:
                    before = found.get(path, masks)
                    found[path] = [a | b for a, b in zip(before, masks, strict=True)]
        return found


_QKV = ("query", "key", "value")


def is_plain(linear: nn.Module) -> bool:
    """Whether a Linear runs torch's own code on a weight [out, in] that is a plain tensor: not quantised."""
    weight = linear.weight
    plain = type(weight) in (nn.Parameter, Tensor) and isinstance(weight, Tensor) and weight.is_floating_point()
    own = type(linear).forward is nn.Linear.forward
    return own and plain and weight.shape == (linear.out_features, linear.in_features)


def partitions(features: int, size: int, heads: Sequence[int]) -> Iterator[tuple[Runs, ...]]:
    """Yield ways to divide features between `size` ranks: runs of units of every piece."""
    seen = set()
    for count in (*heads, None):
        for pieces in range(1, MOST_PIECES + 1):
            width = features // pieces
            units = width if count is None else count
            if features % pieces or width % units or units < size or (pieces, units) in seen:
                continue
            seen.add((pieces, units))
            ends = [units * rank // size * (width // units) for rank in range(size + 1)]
            yield tuple(
                tuple((piece * width + ends[rank], piece * width + ends[rank + 1]) for piece in range(pieces))
                for rank in range(size)
            )


def _is_local_norm(target: Target, masks: Masks) -> bool:
    """Whether a norm is reached with all its features by every rank: it is over a head."""
    return target[0] == NORM and all(bool(mask.all()) for mask in masks)


def _overlap(masks: Masks) -> bool:
    """Whether two ranks reach the same features, or one reaches none."""
    return not all(bool(mask.any()) for mask in masks) or bool((torch.stack(masks).sum(0) > 1).any())


def _cut_of(path: str, masks: Masks) -> FeatureCut:
    return FeatureCut(path, tuple(_runs(mask) for mask in masks))


def _runs(mask: Tensor) -> Runs:
    """Return the runs of true values in a mask [F]."""
    edges = torch.diff(mask.int(), prepend=mask.new_zeros(1).int(), append=mask.new_zeros(1).int())
    starts, ends = (edges == 1).nonzero().flatten().tolist(), (edges == -1).nonzero().flatten().tolist()
    return tuple(zip(starts, ends, strict=True))


def count_choices(block: nn.Module, columns: Sequence[FeatureCut], heads: Sequence[int]) -> Iterator[tuple[Count, ...]]:
    """Yield the attributes to change, for one attempt after the other: none at first."""
    tried: set[tuple[Count, ...]] = set()
    for names in _NAMES:
        counts = tuple(each for each in _counts(block, columns, heads) if any(part in each.name for part in names))
        if counts not in tried:
            tried.add(counts)
            yield counts


def _counts(block: nn.Module, columns: Sequence[FeatureCut], heads: Sequence[int]) -> Iterator[Count]:
    """Yield attributes of what holds a column, or of what holds that, with the share of each rank."""
    found = set()
    for column in columns:
        sizes = column.sizes()
        whole, pieces = sum(sizes), len(column.runs[0])
        amounts = {*heads, *(whole // pieces * number for number in range(1, pieces + 1))}
        owner = column.path.rpartition(".")[0]
        for path in dict.fromkeys((owner, owner.rpartition(".")[0])):
            for name, value in vars(block.get_submodule(path)).items():
                wanted = type(value) is int and value in amounts and all(value * size % whole == 0 for size in sizes)
                if wanted and (path, name) not in found:
                    found.add((path, name))
                    yield Count(path, name, tuple(value * size // whole for size in sizes))
