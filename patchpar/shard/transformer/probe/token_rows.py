"""The argument of a block whose rows are its tokens, and where these are in attention and in the outputs."""

from collections.abc import Iterator
from contextlib import suppress

import torch
from torch import Tensor

from patchpar.errors import UnsupportedModel
from patchpar.shard.transformer.probe.observe_block import StandIn, part_argument
from patchpar.shard.transformer.probe.row_trace import UNMOVED, RowSources
from patchpar.shard.transformer.token_plan import AttentionTokens, Replicated, TokenRows


class TokenArgument:
    """An argument whose rows along `dim` are the tokens. `traced`: the sources of all that is observed in the block."""

    def __init__(self, name: str, dim: int, size: int, run: tuple[int, int], traced: dict[str, RowSources]) -> None:
        self.name, self.dim, self.size, self.traced = name, dim, size, traced
        self.first, self.count = run
        self.rows = run_as_rows(dim, self.first, self.count, size)

    def with_all_rows(self) -> "TokenArgument":
        """Return the same argument with all its rows as tokens."""
        return TokenArgument(self.name, self.dim, self.size, (0, self.size), self.traced)

    @property
    def reaches_attention(self) -> bool:
        """Whether each row of some call's queries or keys, or of a severed part's arguments, is one token.

        Raises UnsupportedModel.
        """
        return any(
            self._has_rows(name, -2)
            for name in self.traced
            if name.endswith(("query", "key")) or name.startswith("part")
        )

    def is_joined(self, number: int) -> bool:
        """Whether each row of the queries and of the keys of the attention call `number` is one token at most.

        Raises UnsupportedModel.
        """
        return all(self._has_rows(f"attention {number} {what}", -2) for what in ("query", "key"))

    @property
    def reaches_output(self) -> bool:
        """Whether an output of the block has these rows; the rows of positions do not reach it.

        Raises UnsupportedModel.
        """
        return any(self._has_rows(name, None) for name in self.traced if name.startswith("output"))

    def _has_rows(self, name: str, dim: int | None) -> bool:
        with suppress(UnsupportedModel):
            return self._rows_in(name, dim) is not None
        return False

    def _tokens(self, sources: RowSources, dim: int) -> Tensor | None:
        """Return the token at each index along `dim`, UNMOVED at other rows; None if it is no dim of tokens."""
        dim %= len(sources.by_dim)
        if dim not in sources.row_dims():
            return None
        tokens = sources.by_dim[dim] - self.first
        tokens[(tokens < 0) | (tokens >= self.count)] = UNMOVED
        return tokens if (tokens >= 0).any() else None

    def start_in(self, traced: dict[str, RowSources]) -> int | None:
        """Return the row of another argument where the tokens start; None unless it has one row for each, in order."""
        starts = set()
        covered = torch.zeros(self.count, dtype=torch.bool)
        for tokens, rows in self._beside(traced):
            there = rows != UNMOVED
            if (rows[there] < 0).any():
                return None
            starts.update((rows[there] - tokens[there]).tolist())
            covered[tokens[there]] = True
        return int(starts.pop()) if len(starts) == 1 and covered.all() else None

    def _beside(self, traced: dict[str, RowSources]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield (tokens, their sources in another argument) wherever some of them have a single row there."""
        for point in traced.keys() & self.traced.keys():
            if point.endswith("mask"):
                continue
            for dim in self.traced[point].row_dims():
                tokens = self._tokens(self.traced[point], dim)
                if tokens is not None:
                    ours = tokens >= 0
                    rows = traced[point].by_dim[dim][ours]
                    if (rows >= 0).any():
                        yield tokens[ours], rows

    def attention(self, number: int) -> AttentionTokens:
        """Return where tokens are in the attention call `number`. Raises UnsupportedModel."""
        queries, keys, values = (self._rows_in(f"attention {number} {what}", -2) for what in ("query", "key", "value"))
        if keys != values:
            raise UnsupportedModel(f"its attention {number} has its tokens at other rows of keys than of values")
        mask = self.traced.get(f"attention {number} mask")
        return AttentionTokens(queries, keys, None if mask is None else len(mask.by_dim))

    @property
    def num_attentions(self) -> int:
        """The number of attention calls."""
        return sum(name.startswith("attention") and name.endswith("query") for name in self.traced)

    def replicated(self, part: StandIn) -> Replicated:
        """Return where tokens are in the arguments and outputs of a part. Raises UnsupportedModel."""
        prefix = part_argument(part.path, "")
        found = {
            name.removeprefix(prefix): self._rows_in(name, None) for name in self.traced if name.startswith(prefix)
        }
        inputs = {name: rows for name, rows in found.items() if rows is not None}
        outputs = {number: inputs[name] for number, (name, _) in part.sources.items() if name in inputs}
        return Replicated(part.path, inputs, outputs)

    def sums(self) -> frozenset[int]:
        """Return the calls that sum over tokens: each token is one term, or one row of both factors of a product."""
        found = set()
        for name, left in self.traced.items():
            if name.startswith("sum") and self._all_tokens(left, len(left.by_dim) - 1):
                found.add(int(name.split()[1]))
            right = self.traced.get(name.replace("left", "right"))
            if name.startswith("product") and name.endswith("left") and right is not None:
                sides = [(left, len(left.by_dim) - 1), (right, len(right.by_dim) - 2)]
                if all(self._all_tokens(sources, dim) for sources, dim in sides):
                    found.add(int(name.split()[1]))
        return frozenset(found)

    def _all_tokens(self, sources: RowSources, dim: int) -> bool:
        """Whether the indices along `dim` are the tokens in their order, and nothing else."""
        tokens = self._tokens(sources, dim) if dim >= 0 else None
        return tokens is not None and torch.equal(tokens, torch.arange(self.count))

    def convolutions(self) -> dict[int, tuple[int, int, int]]:
        """Return planes, rows and columns of tokens by the number of each convolution. Raises UnsupportedModel."""
        found = {}
        for name, sources in self.traced.items():
            if name.startswith("convolution") and name.endswith("cells") and sources.moved:
                if not self._all_tokens(sources, 2):
                    raise UnsupportedModel(
                        f"the cells of its {name.removesuffix(' cells')} are not the tokens in order"
                    )
                planes, rows, columns = map(len, self.traced[name.replace("cells", "grid")].by_dim[2:])
                found[int(name.split()[1])] = (planes, rows, columns)
        return found

    def outputs(self) -> dict[int, TokenRows]:
        """Return where tokens are in the block's outputs. Raises UnsupportedModel."""
        found = {}
        for name in self.traced:
            if name.startswith("output"):
                rows = self._rows_in(name, None)
                if rows is not None:
                    found[int(name.split()[1])] = rows
        return found

    def _rows_in(self, name: str, dim: int | None) -> TokenRows | None:
        """Return the run of tokens in an observed tensor along `dim`, or along any dim. Raises UnsupportedModel."""
        sources = self.traced[name]
        if not sources.moved:
            return None
        dims = sources.row_dims() if dim is None else [dim % len(sources.by_dim)]
        if len(dims) != 1 or dims[0] not in sources.row_dims():
            raise UnsupportedModel(
                f"its {name} depends on several tokens at once: they meet outside attention, or in groups"
            )
        tokens = self._tokens(sources, dims[0])
        if tokens is None:
            return None
        positions = (tokens >= 0).nonzero().flatten()
        if (
            len(positions) != self.count
            or not torch.equal(tokens[positions], torch.arange(self.count))
            or not _is_run(positions)
        ):
            raise UnsupportedModel(f"its {name} does not have the tokens in their order, one after the other")
        return run_as_rows(dims[0], int(positions[0]), self.count, len(tokens))


def run_of(moved: Tensor) -> tuple[int, int] | None:
    """Return (start, count) of the true indices of `moved` [size] if they are one run, else None."""
    positions = moved.nonzero().flatten()
    return (int(positions[0]), len(positions)) if len(positions) and _is_run(positions) else None


def _is_run(positions: Tensor) -> bool:
    return int(positions[-1]) - int(positions[0]) + 1 == len(positions)


def run_as_rows(dim: int, start: int, count: int, size: int) -> TokenRows:
    """Return the rows of a run; of the numbers of rows before and after it, only the smaller one is kept as fixed."""
    after = size - start - count
    if start == 0 and after == 0:
        return TokenRows(dim)
    return TokenRows(dim, start, None) if start <= after else TokenRows(dim, None, after)
