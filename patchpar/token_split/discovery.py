"""Find where a transformer's tokens are, by disturbing them: no names, no lengths, no list of models.

    1. disturb the latent         what moves in a block's arguments are its tokens
    2. disturb each argument      whichever row moves a token's query, key, value or output belongs to that token
    3. look at attention          which keys are tokens, which of them every rank has anyway
    4. disturb the latent's rows  in which grid the tokens lie, see `origin`

Attention is severed meanwhile (see `watch`). A block in which a token moves another one nevertheless is looked at again
with sums over tokens and convolutions severed as well (see `mixing`); if it does so still, it cannot be split.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from patchpar.errors import UnsupportedModel
from patchpar.refusal import in_one_line, is_of_the_split
from patchpar.token_split.anchor import Anchor, run_as_rows, run_of
from patchpar.token_split.grouped import group_here
from patchpar.token_split.latent import WAY_OUT, latent_size, name_of_latent, with_other_latent
from patchpar.token_split.mixing import Mixing
from patchpar.token_split.origin import Origins
from patchpar.token_split.plan import BlockPlan, Rows, TokenPlan
from patchpar.token_split.proof import proved
from patchpar.token_split.provenance import Observed, Sources, moved_indices, trace_rows
from patchpar.token_split.shortened import shortened
from patchpar.token_split.watch import Arguments, Kind, Seen, SeenBlock, observe_block, watch


def discover_tokens(
    denoiser: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any, known: TokenPlan | None = None
) -> TokenPlan:
    """Watch one call of `forward`, the denoiser's own, and tell where its tokens are. Raises UnsupportedModel.

    `known`: a plan for other calls, to which only blocks that are called otherwise are added.
    """
    arguments = Arguments.of(denoiser, args, kwargs)
    latent = name_of_latent(denoiser, arguments)
    watched = partial(watch, denoiser, forward)
    seen, moved = watched(arguments), watched(with_other_latent(arguments, latent))
    size = latent_size(arguments, latent)
    found, whole, others = _looked_at(seen, moved, size, known)
    if not found and known is None:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in whole.items()) or "none of its blocks has tokens"
        raise UnsupportedModel(f"{type(denoiser).__name__} cannot be split by tokens ({reasons}): {WAY_OUT}")
    with shortened(denoiser, (plan.paths for plan in found.values())):
        blocks = Origins(watched, arguments, latent).of_all(found)
    for plan in blocks:
        if plan.mixing is not None and plan.mixing.convolutions and plan.origin is None:
            raise UnsupportedModel(
                f"{type(denoiser).__name__} cannot be split by tokens ({plan.name}: it convolves its tokens, but in "
                f"which rows they lie could not be found): {WAY_OUT}"
            )
    new = TokenPlan(denoiser=type(denoiser).__name__, latent=latent, blocks=blocks, whole=whole, others=others)
    return new if known is None else known.joined(new)


def _looked_at(
    seen: Seen, moved: Seen, size: int, known: TokenPlan | None
) -> tuple[dict[Kind, BlockPlan], dict[str, str], frozenset[tuple[str, tuple[str, ...]]]]:
    """What is found of each kind of block that is not known; the reasons of those that are not split, and which."""
    found, whole, others = dict[Kind, BlockPlan](), dict[str, str](), list[tuple[str, tuple[str, ...]]]()
    for kind, block in seen.blocks.items():
        if known is not None and known.knows(block.paths, kind[-1]):
            continue
        plan = None
        try:
            with group_here(block.module):
                plan = _plan_of(block, _the_same(moved.blocks.get(kind)), size)
        except Exception as error:
            if not is_of_the_split(error):
                raise
            reason = str(error) if isinstance(error, UnsupportedModel) else f"watched, it fails: {in_one_line(error)}"
            whole[f"{block.name}, {len(block.paths)} x {type(block.module).__name__}"] = reason
        if plan is not None:
            found[kind] = plan
        else:
            others += [(path, kind[-1]) for path in block.paths]
    return found, whole, frozenset(others)


def _the_same(moved: SeenBlock | None) -> SeenBlock:
    """The same kind of block in the other run. Raises UnsupportedModel."""
    if moved is None:
        raise UnsupportedModel("which blocks are called, and with what, depends on the values of the latent")
    return moved


def _plan_of(block: SeenBlock, moved: SeenBlock, latent_size: int) -> BlockPlan | None:
    """What to do at such blocks, in which tokens meet in attention alone or else in sums and convolutions too.

    None where there is nothing to split. Raises UnsupportedModel.
    """
    try:
        return _BlockProbe(block, moved, latent_size).plan()
    except UnsupportedModel:
        try:
            found = _mixing_plan(block, moved, latent_size)
        except Exception as error:
            if not is_of_the_split(error):
                raise
            found = None
        if found is None:
            raise
        return found


def _mixing_plan(block: SeenBlock, moved: SeenBlock, latent_size: int) -> BlockPlan | None:
    """A plan with sums over tokens or convolutions; None where there are none. Raises UnsupportedModel.

    Whatever a sum goes into depends on all tokens, so that sums are found one after the other.
    """
    sums: frozenset[int] = frozenset()
    while True:
        probe = _BlockProbe(block, moved, latent_size, sums)
        more = probe.sums() - sums
        if not more:
            break
        sums |= more
    plan = probe.plan()
    return plan if plan is not None and plan.mixing != Mixing() else None


class _BlockProbe:
    """One kind of block, asked what its tokens are.

    `sums`: products that are known to sum over tokens; None where tokens are taken to meet in attention alone.
    """

    def __init__(
        self, block: SeenBlock, moved: SeenBlock, latent_size: int, sums: frozenset[int] | None = None
    ) -> None:
        self.block, self.latent_size, self._sums = block, latent_size, sums
        self.tensors = {name: x for name, x in block.arguments.tensors().items() if x.ndim}
        others = moved.arguments.tensors()
        self._undisturbed: Observed | None = None
        self.moved = {name: moved_indices(x, others[name]) for name, x in self.tensors.items() if _is(x, others[name])}

    def plan(self) -> BlockPlan | None:
        """What to do at such blocks; None where there is nothing to split. Raises UnsupportedModel."""
        carriers = self._carriers()
        if not carriers:
            return None
        if not self.block.attentions:
            raise UnsupportedModel("it does not call scaled_dot_product_attention (but flex_attention, or its own)")
        found = [each for name in carriers if (each := self._anchor(name)) is not None]
        if not found:
            raise UnsupportedModel(
                "none of its arguments has tokens that reach scaled_dot_product_attention one by one: with linear "
                "attention, flex_attention or convolutions they meet elsewhere"
            )
        anchor = max(found, key=lambda each: each.count)
        if anchor.rows.alone:
            return self._plan_for(anchor)
        if self.latent_size % anchor.count == 0:
            with suppress(UnsupportedModel):
                return self._plan_for(anchor)
        return self._plan_for(anchor.with_all_rows())  # what is beside the tokens is split like them

    def _carriers(self) -> list[str]:
        return [name for name, indices in self.moved.items() if indices[0].any()]

    def sums(self) -> frozenset[int]:
        """Products that sum over tokens, as far as these come to them one by one."""
        anchors = (each for name in self._carriers() for each in self._anchors(name))
        return frozenset().union(*(anchor.sums() for anchor in anchors))

    def _plan_for(self, anchor: "Anchor") -> BlockPlan:
        inputs = {anchor.name: anchor.rows}
        for name in self.tensors:
            if name != anchor.name and (rows := self._rows_of(name, anchor)) is not None:
                inputs[name] = rows
        attentions = tuple(anchor.attention(number) for number in range(self.block.attentions))
        outputs = anchor.outputs()
        everywhere = [*inputs.values(), *(call.keys for call in attentions), *outputs.values()]
        if not anchor.rows.alone and any(rows is not None and rows.amid for rows in everywhere):
            raise UnsupportedModel("there is something before its tokens and something after them")
        plan = BlockPlan(
            name=self.block.name,
            kind=type(self.block.module).__name__,
            paths=tuple(self.block.paths),
            signature=self.block.arguments.signature(),
            inputs=inputs,
            counts=(),
            attentions=attentions,
            outputs=outputs,
            ratio=anchor.count / self.latent_size,
        )
        if self._sums is None:
            return proved(plan, self.block, anchor.count, (anchor.count, anchor.size))
        convolutions = anchor.convolutions()
        grids = set(convolutions.values())
        if len(grids) > 1:
            raise UnsupportedModel("its convolutions are over different grids of its tokens")
        plan = replace(plan, mixing=Mixing(sums=tuple(sorted(self._sums)), convolutions=tuple(convolutions)))
        num_rows = grids.pop()[0] if grids else None
        return proved(plan, self.block, anchor.count, (anchor.count, anchor.size), num_rows)

    def _trace(self, name: str, dim: int) -> dict[str, Sources]:
        x = self.tensors[name]
        return trace_rows(partial(self._observe, name), x, dim, self._base if x.is_contiguous() else None)

    @property
    def _base(self) -> Observed:
        """What is observed with nothing disturbed."""
        if self._undisturbed is None:
            self._undisturbed = observe_block(self.block.module, self.block.arguments, self._sums)
        return self._undisturbed

    def _observe(self, name: str, x: Tensor) -> Observed:
        arguments = self.block.arguments.map(lambda other, leaf: x if other == name else leaf)
        return observe_block(self.block.module, arguments, self._sums)

    def _anchor(self, name: str) -> "Anchor | None":
        """The argument `name` as what carries the tokens, if its rows reach attention."""
        return next((each for each in self._anchors(name) if each.reaches_attention), None)

    def _anchors(self, name: str) -> list["Anchor"]:
        """What the argument `name` would be, if its rows along one dim or another were the tokens."""
        x = self.tensors[name]
        if not x.is_floating_point():
            return []
        candidates = []
        for dim in range(x.ndim):
            if x.shape[dim] < 2:
                continue
            run = run_of(self.moved[name][dim]) or (0, x.shape[dim])  # in several runs: all rows are taken for tokens
            traced = self._trace(name, dim)
            if traced:
                candidates.append(Anchor(name, dim, x.shape[dim], run, traced))
        return candidates

    def _rows_of(self, name: str, anchor: "Anchor") -> Rows | None:
        """Which rows of the argument `name` belong to the anchor's tokens, one to each; None where that is not so.

        It stays whole then, as a mask does, or a table that positions look things up in.
        """
        x = self.tensors[name]
        for dim in range(x.ndim):
            if x.shape[dim] > 1:
                with suppress(RuntimeError, ValueError, IndexError):  # it cannot be anything else than it is
                    start = anchor.start_in(self._trace(name, dim))
                    if start is not None:
                        return run_as_rows(dim, start, anchor.count, x.shape[dim])
        return None


def _is(x: Tensor, other: Tensor) -> bool:
    if x.shape != other.shape:
        raise UnsupportedModel("the shape of its arguments depends on the values of the latent")
    return True
