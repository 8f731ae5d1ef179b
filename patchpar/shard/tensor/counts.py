"""Integer attributes by which a block's code divides features into heads: a rank that holds some has fewer.

No attribute is known by name alone: those whose values are numbers of heads or of features of a column are tried, the
likeliest names first, and the proof decides.
"""

from collections.abc import Iterator, Sequence

from torch import nn

from patchpar.shard.tensor.feature_plan import Count, FeatureCut

_NAMES = ((), ("head",), ("head", "inner", "hidden", "embed", "dim"))
"""Parts of names, for one attempt after the other."""


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
