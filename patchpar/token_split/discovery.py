"""Find where a transformer's tokens are, by disturbing them: no names, no lengths, no list of models.

    1. disturb the latent      what moves in a block's arguments are its tokens
    2. disturb each argument   whichever row moves a token's query, key, value or output belongs to that token
    3. look at attention       which keys are tokens, which of them every rank has anyway

Attention is severed meanwhile (see `watch`). A block in which a token moves another one nevertheless cannot be split.
"""

from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from patchpar.errors import UnsupportedModel
from patchpar.token_split.plan import AttentionCall, BlockPlan, Rows, TokenPlan
from patchpar.token_split.provenance import UNMOVED, Observed, Sources, disturbed, moved_indices, trace_rows
from patchpar.token_split.watch import Arguments, SeenBlock, observe_block, parameter_names, watch

WAY_OUT = "use plan cfg=2 or data=N, which do not split the tokens"


def discover_tokens(denoiser: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> TokenPlan:
    """Watch one call of `forward`, the denoiser's own, and tell where its tokens are. Raises UnsupportedModel."""
    arguments = Arguments.of(denoiser, args, kwargs)
    latent = parameter_names(denoiser)[0]
    seen = watch(denoiser, forward, arguments)
    moved = watch(denoiser, forward, with_other_latent(arguments, latent))
    size = latent_size(arguments, latent)
    blocks, whole = [], {}
    for kind, block in seen.blocks.items():
        try:
            plan = _BlockProbe(block, moved.blocks[kind], size).plan()
        except KeyError:
            raise UnsupportedModel(f"{block.name} is called in ways that depend on values: {WAY_OUT}") from None
        except UnsupportedModel as error:
            whole[f"{block.name}, {len(block.paths)} x {type(block.module).__name__}"] = str(error)
            continue
        if plan is not None:
            blocks.append(plan)
    if not blocks:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in whole.items()) or "none of its blocks has tokens"
        raise UnsupportedModel(f"{type(denoiser).__name__} cannot be split by tokens ({reasons}): {WAY_OUT}")
    return TokenPlan(denoiser=type(denoiser).__name__, latent=latent, blocks=tuple(blocks), whole=whole)


def with_other_latent(arguments: Arguments, latent: str) -> Arguments:
    """The same call with other numbers in what is denoised."""
    return arguments.map(
        lambda name, leaf: (
            disturbed(leaf, 0, torch.arange(leaf.shape[0]))
            if _belongs(name, latent) and isinstance(leaf, Tensor)
            else leaf
        )
    )


def _belongs(name: str, latent: str) -> bool:
    return name == latent or name.startswith(f"{latent}[")


def latent_size(arguments: Arguments, latent: str) -> int:
    """How many numbers the latent of one sample has. Raises UnsupportedModel."""
    leaves = [leaf for name, leaf in arguments.tensors().items() if _belongs(name, latent)]
    if not leaves:
        raise UnsupportedModel(f"the first argument, {latent}, holds no tensor: {WAY_OUT}")
    samples = leaves[0].shape[0] if len(leaves) == 1 else len(leaves)
    return sum(leaf.numel() for leaf in leaves) // samples


class _BlockProbe:
    """One kind of block, asked what its tokens are."""

    def __init__(self, block: SeenBlock, moved: SeenBlock, latent_size: int) -> None:
        self.block, self.latent_size = block, latent_size
        self.tensors = {name: x for name, x in block.arguments.tensors().items() if x.ndim}
        others = moved.arguments.tensors()
        self.moved = {name: moved_indices(x, others[name]) for name, x in self.tensors.items() if _is(x, others[name])}

    def plan(self) -> BlockPlan | None:
        """What to do at such blocks; None where there is nothing to split. Raises UnsupportedModel."""
        carriers = [name for name, indices in self.moved.items() if indices[0].any()]
        if not carriers:
            return None
        if not self.block.attentions:
            raise UnsupportedModel("it does not call scaled_dot_product_attention")
        found = [each for name in carriers if (each := self._anchor(name)) is not None]
        if not found:
            raise UnsupportedModel("no argument of its blocks has tokens along one dim that reach attention one by one")
        anchor = max(found, key=lambda each: each.count)
        if anchor.rows.alone:
            return self._plan_for(anchor)
        if self.latent_size % anchor.count == 0:
            with suppress(UnsupportedModel):
                return self._plan_for(anchor)
        return self._plan_for(anchor.with_all_rows())  # what is beside the tokens is split like them

    def _plan_for(self, anchor: "_Anchor") -> BlockPlan:
        inputs = {anchor.name: anchor.rows}
        for name in self.tensors:
            if name != anchor.name and (rows := self._rows_of(name, anchor)) is not None:
                inputs[name] = rows
        attentions = tuple(anchor.attention(number) for number in range(self.block.attentions))
        outputs = anchor.outputs()
        everywhere = [*inputs.values(), *(call.keys for call in attentions), *outputs.values()]
        if not anchor.rows.alone and any(rows is not None and rows.amid for rows in everywhere):
            raise UnsupportedModel("there is something before its tokens and something after them")
        return BlockPlan(
            name=self.block.name,
            kind=type(self.block.module).__name__,
            paths=tuple(self.block.paths),
            signature=self.block.arguments.signature(),
            inputs=inputs,
            attentions=attentions,
            outputs=outputs,
            ratio=anchor.count / self.latent_size,
        )

    def _trace(self, name: str, dim: int) -> dict[str, Sources]:
        return trace_rows(partial(self._observe, name), self.tensors[name], dim)

    def _observe(self, name: str, x: Tensor) -> Observed:
        arguments = self.block.arguments.map(lambda other, leaf: x if other == name else leaf)
        return observe_block(self.block.module, arguments)

    def _anchor(self, name: str) -> "_Anchor | None":
        """The argument `name` as what carries the tokens, if its rows reach attention."""
        x = self.tensors[name]
        if not x.is_floating_point():
            return None
        candidates = []
        for dim in range(x.ndim):
            if x.shape[dim] < 2 or not (run := _run(self.moved[name][dim])):
                continue
            traced = self._trace(name, dim)
            if traced:
                candidates.append(_Anchor(name, dim, x.shape[dim], run, traced))
        reaching = [each for each in candidates if each.reaches_attention]
        return reaching[0] if reaching else None

    def _rows_of(self, name: str, anchor: "_Anchor") -> Rows | None:
        """Which rows of the argument `name` belong to the anchor's tokens, one to each; None where that is not so.

        It stays whole then, as a mask does, or a table that positions look things up in.
        """
        x = self.tensors[name]
        for dim in range(x.ndim):
            if x.shape[dim] > 1:
                with suppress(RuntimeError, ValueError, IndexError):  # it cannot be anything else than it is
                    start = anchor.start_in(self._trace(name, dim))
                    if start is not None:
                        return _rows(dim, start, anchor.count, x.shape[dim])
        return None


def _is(x: Tensor, other: Tensor) -> bool:
    if x.shape != other.shape:
        raise UnsupportedModel("the shape of its arguments depends on the values of the latent")
    return True


class _Anchor:
    """An argument whose rows are the tokens, and where they go in the block."""

    def __init__(self, name: str, dim: int, size: int, run: tuple[int, int], traced: dict[str, Sources]) -> None:
        self.name, self.dim, self.size, self.traced = name, dim, size, traced
        self.first, self.count = run
        self.rows = _rows(dim, self.first, self.count, size)

    def with_all_rows(self) -> "_Anchor":
        """The same, what is beside the tokens taken for tokens as well."""
        return _Anchor(self.name, self.dim, self.size, (0, self.size), self.traced)

    @property
    def reaches_attention(self) -> bool:
        """Whether the keys or queries of some call are these tokens, one by one."""
        for name in self.traced:
            if name.endswith(("query", "key")):
                with suppress(UnsupportedModel):
                    if self._rows_in(name, -2) is not None:
                        return True
        return False

    def _tokens(self, sources: Sources, dim: int) -> Tensor | None:
        """The token at each index along `dim`, UNMOVED at others'; None where it is no dim of tokens."""
        dim %= len(sources.by_dim)
        if dim not in sources.row_dims():
            return None
        tokens = sources.by_dim[dim] - self.first
        tokens[(tokens < 0) | (tokens >= self.count)] = UNMOVED
        return tokens if (tokens >= 0).any() else None

    def start_in(self, traced: dict[str, Sources]) -> int | None:
        """At which row of another argument the tokens start; None unless it has one row for each, in their order."""
        starts = set()
        covered = torch.zeros(self.count, dtype=torch.bool)
        for tokens, rows in self._beside(traced):
            there = rows != UNMOVED
            if (rows[there] < 0).any():
                return None
            starts.update((rows[there] - tokens[there]).tolist())
            covered[tokens[there]] = True
        return int(starts.pop()) if len(starts) == 1 and covered.all() else None

    def _beside(self, traced: dict[str, Sources]) -> Iterator[tuple[Tensor, Tensor]]:
        """(tokens, their sources in another argument), wherever some of them have one row there."""
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

    def attention(self, number: int) -> AttentionCall:
        """What the call of that number sees of the tokens. Raises UnsupportedModel."""
        queries, keys, values = (self._rows_in(f"attention {number} {what}", -2) for what in ("query", "key", "value"))
        if keys != values:
            raise UnsupportedModel(f"its attention {number} has tokens elsewhere among the keys than among the values")
        mask = self.traced.get(f"attention {number} mask")
        return AttentionCall(queries, keys, None if mask is None else len(mask.by_dim))

    def outputs(self) -> dict[int, Rows]:
        """Where tokens are in what the block returns. Raises UnsupportedModel."""
        found = {}
        for name in self.traced:
            if name.startswith("output"):
                rows = self._rows_in(name, None)
                if rows is not None:
                    found[int(name.split()[1])] = rows
        return found

    def _rows_in(self, name: str, dim: int | None) -> Rows | None:
        """The run of tokens in something observed: along `dim`, or whichever dim has them. Raises UnsupportedModel."""
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
        places = (tokens >= 0).nonzero().flatten()
        if (
            len(places) != self.count
            or not torch.equal(tokens[places], torch.arange(self.count))
            or not _is_run(places)
        ):
            raise UnsupportedModel(f"its {name} does not have the tokens in their order, one after the other")
        return _rows(dims[0], int(places[0]), self.count, len(tokens))


def _run(moved: Tensor) -> tuple[int, int] | None:
    """(start, count) of the indices that moved, where they are one run."""
    places = moved.nonzero().flatten()
    return (int(places[0]), len(places)) if len(places) and _is_run(places) else None


def _is_run(places: Tensor) -> bool:
    return int(places[-1]) - int(places[0]) + 1 == len(places)


def _rows(dim: int, start: int, count: int, size: int) -> Rows:
    """Of the numbers before and after only one can be told to stay: the smaller one."""
    after = size - start - count
    if start == 0 and after == 0:
        return Rows(dim)
    return Rows(dim, start, None) if start <= after else Rows(dim, None, after)
