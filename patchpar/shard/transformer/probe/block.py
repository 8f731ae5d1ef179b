"""Find the tokens of one kind of block: which rows of its arguments reach which rows of attention and the outputs."""

import math
from contextlib import suppress
from dataclasses import replace
from functools import partial

from torch import Tensor

from patchpar.errors import UnsupportedModel
from patchpar.shard.transformer.probe.capture import CapturedBlock
from patchpar.shard.transformer.probe.check import proved
from patchpar.shard.transformer.probe.grid import grid_of, mixing_of
from patchpar.shard.transformer.probe.observe_block import WHOLE, Severance, observe_block
from patchpar.shard.transformer.probe.row_trace import Observed, RowSources, moved_indices, trace_rows
from patchpar.shard.transformer.probe.token_rows import TokenArgument, run_as_rows, run_of
from patchpar.shard.transformer.token_plan import BlockPlan, TokenRows
from patchpar.shard.unsupported_model import attempted


class BlockProbe:
    """Searches a kind of block. `moved`: its call with another latent. `severance`: where else its tokens are mixed.

    Raises UnsupportedModel for a block whose arguments change their shape with the latent.
    """

    def __init__(
        self, block: CapturedBlock, moved: CapturedBlock, latent_size: int, severance: Severance = WHOLE
    ) -> None:
        self.block, self.latent_size, self._severance = block, latent_size, severance
        self.tensors = {name: x for name, x in block.arguments.tensors().items() if x.ndim}
        others = moved.arguments.tensors()
        self._unperturbed: dict[int, Observed] = {}
        self._traced: dict[tuple[str, int, int], dict[str, RowSources]] = {}
        self.moved = {name: moved_indices(x, others[name]) for name, x in self.tensors.items() if _is(x, others[name])}

    def plan(self) -> BlockPlan | None:
        """Return the plan of such blocks; None where there is nothing to split. Raises UnsupportedModel."""
        carriers = self._carriers()
        if not carriers:
            return None
        if not self.block.attentions and not self._severance.parts:
            raise UnsupportedModel("it does not call scaled_dot_product_attention (but flex_attention, or its own)")
        found = [each for name in carriers if (each := self._anchor(name)) is not None]
        if not found:
            raise UnsupportedModel(
                "none of its arguments has tokens that reach scaled_dot_product_attention one by one: with linear "
                "attention, flex_attention or convolutions they meet elsewhere"
            )
        anchor = max(found, key=lambda each: (each.reaches_output, each.count))
        if anchor.rows.alone:
            return self._plan_for(anchor)
        if self.latent_size % anchor.count == 0:
            with suppress(UnsupportedModel):
                return self._plan_for(anchor)
        return self._plan_for(anchor.with_all_rows())  # rows beside the tokens are split like them

    def _carriers(self) -> list[str]:
        return [name for name, indices in self.moved.items() if indices[0].any()]

    def sums(self) -> frozenset[int]:
        """Return the numbers of the products that sum over tokens, if each term is one token."""
        anchors = (each for name in self._carriers() for each in self._anchors(name))
        return frozenset().union(*(anchor.sums() for anchor in anchors))

    def _plan_for(self, anchor: "TokenArgument") -> BlockPlan:
        inputs = self.inputs_beside(anchor)
        attentions = tuple(anchor.attention(number) for number in range(anchor.num_attentions))
        outputs = anchor.outputs()
        everywhere = [*inputs.values(), *(call.keys for call in attentions), *outputs.values()]
        if not anchor.rows.alone and any(rows is not None and rows.amid for rows in everywhere):
            raise UnsupportedModel("there are other rows before its tokens and after them")
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
            replicated=tuple(map(anchor.replicated, self._severance.parts)),
        )
        sizes, sums = (anchor.count, anchor.size), self._severance.sums
        if sums is None:
            return proved(plan, self.block, self._severance, sizes)
        shapes = anchor.convolutions()
        grid = grid_of(shapes)
        return proved(
            replace(plan, mixing=mixing_of(sums, shapes, grid), watched=("",)),
            self.block,
            self._severance_for(anchor),
            sizes,
            grid,
        )

    def _severance_for(self, anchor: "TokenArgument") -> Severance:
        return self._severance_of(self.tensors[anchor.name], anchor.dim)

    def _severance_of(self, x: Tensor, dim: int) -> Severance:
        """Return the severance for the sequences of x, of any shape, whose tokens lie along `dim`.

        Convolutions alone are severed by their number.
        """
        if self._severance.sums is None:
            return self._severance
        return replace(self._severance, sequences=math.prod(x.shape[:dim]))

    def argument(self, name: str, dim: int, run: tuple[int, int]) -> TokenArgument | None:
        """Return the argument `name` with the `run` (first, count) of its rows along `dim` as tokens.

        None if none of its rows is the only source of anything.
        """
        traced = self._trace(name, dim, self._severance)
        return TokenArgument(name, dim, self.tensors[name].shape[dim], run, traced) if traced else None

    def inputs_beside(self, anchor: TokenArgument) -> dict[str, TokenRows]:
        """Return the rows of the anchor's tokens in each argument, the anchor's own first."""
        inputs = {anchor.name: anchor.rows}
        for name in self.tensors:
            if name != anchor.name and (rows := self._rows_of(name, anchor)) is not None:
                inputs[name] = rows
        return inputs

    def _trace(self, name: str, dim: int, severance: Severance) -> dict[str, RowSources]:
        """Return the sources among the rows of an argument along `dim`. Each search is made once."""
        key, x = (name, dim, severance.sequences), self.tensors[name]
        if key not in self._traced:
            observe = partial(self._observe, name, severance)
            self._traced[key] = trace_rows(observe, x, dim, self._base(severance, x))
        return self._traced[key]

    def _base(self, severance: Severance, x: Tensor) -> Observed | None:
        """Return what is observed without perturbation; None where x is not contiguous, as perturbed copies are."""
        if not x.is_contiguous():
            return None
        if severance.sequences not in self._unperturbed:
            self._unperturbed[severance.sequences] = observe_block(self.block.module, self.block.arguments, severance)
        return self._unperturbed[severance.sequences]

    def _observe(self, name: str, severance: Severance, x: Tensor) -> Observed:
        arguments = self.block.arguments.map(lambda other, leaf: x if other == name else leaf)
        return observe_block(self.block.module, arguments, severance)

    def _anchor(self, name: str) -> "TokenArgument | None":
        """Return the argument `name` as the carrier of tokens; None unless its rows reach attention."""
        return next((each for each in self._anchors(name) if each.reaches_attention), None)

    def _anchors(self, name: str) -> list["TokenArgument"]:
        """Return the argument `name` as a carrier of tokens, for each dim whose rows may be the tokens."""
        x = self.tensors[name]
        if not x.is_floating_point():
            return []
        candidates = []
        for dim in range(x.ndim):
            if x.shape[dim] < 2:
                continue
            run = run_of(self.moved[name][dim]) or (0, x.shape[dim])  # several runs: all rows count as tokens
            traced = self._trace(name, dim, self._severance_of(x, dim))
            if traced:
                candidates.append(TokenArgument(name, dim, x.shape[dim], run, traced))
        return candidates

    def _rows_of(self, name: str, anchor: "TokenArgument") -> TokenRows | None:
        """Return the rows of the argument `name` that belong to the anchor's tokens, one to each.

        None if there are none: the argument stays whole, as a mask or a lookup table does.
        """
        x = self.tensors[name]
        for dim in range(x.ndim):
            if x.shape[dim] > 1:
                with attempted():  # the block fails with any other values
                    start = anchor.start_in(self._trace(name, dim, self._severance_for(anchor)))
                    if start is not None:
                        return run_as_rows(dim, start, anchor.count, x.shape[dim])
        return None


def _is(x: Tensor, other: Tensor) -> bool:
    if x.shape != other.shape:
        raise UnsupportedModel("the shape of its arguments depends on the values of the latent")
    return True
