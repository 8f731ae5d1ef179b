"""Which rows of a latent, and of its prediction, belong to each piece of the tokens, and how the prediction is sent.

The last stage sends each piece's band of the prediction to all, who fetch it when needed. All ranks take part in each
exchange, in the queue of what is needed later: they receive before they send their own outputs to the next stage, which
in one queue of NCCL would wait for bands that are made of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from patchpar.comm.banded_tensor import BandedTensor
from patchpar.comm.collectives import AxisComm
from patchpar.comm.exchange_part import ExchangePart, Received
from patchpar.comm.pytree import tensors_in, with_tensors
from patchpar.comm.transport import TensorSpec, Work
from patchpar.shard.stages.block_outputs import OutputStructure
from patchpar.shard.stages.stage_pass import OUTPUT
from patchpar.shard.transformer.probe.capture import CallArguments
from patchpar.shard.transformer.probe.latent import is_latent
from patchpar.shard.transformer.token_plan import GridSource, TokenPlan
from patchpar.shard.transformer.token_ranges import Cut, TokenRanges


@dataclass(frozen=True, slots=True)
class LatentBands:
    """Bands along `dim` of a latent, counted from the right: one of each of the `sizes` for each piece."""

    dim: int
    sizes: tuple[int, ...]

    def of(self, x: Tensor, piece: int) -> Tensor:
        """Return the band of a piece, a view of x, of any shape."""
        return x.narrow(self.dim, sum(self.sizes[:piece]), self.sizes[piece])

    def cuts(self, shape: Sequence[int]) -> bool:
        """Whether a tensor of that shape has all bands."""
        return len(shape) >= -self.dim and shape[self.dim] == sum(self.sizes)

    def alone(self, arguments: CallArguments, latent: str, piece: int) -> CallArguments:
        """Return the call with NaN in the latent but for the band of a piece."""

        def change(name: str, leaf: Any) -> Any:
            if not is_latent(name, latent) or not isinstance(leaf, Tensor):
                return leaf
            found = torch.full_like(leaf, torch.nan)
            self.of(found, piece).copy_(self.of(leaf, piece))
            return found

        return arguments.map(change)


def cut_for_bands(plan: TokenPlan | None) -> Cut:
    """Return the unit of pieces with which they are bands: whole rows of an image that is a latent with rows."""
    sources = [block.origin for block in plan.blocks] if plan is not None else []
    return "rows" if any(source is not None and source.dims for source in sources) else "runs"


def bands_of(plan: TokenPlan, ranges: Sequence[TokenRanges], arguments: CallArguments) -> LatentBands | None:
    """Return the bands of the pieces with these `ranges`, one for each list of blocks; None where there are none.

    What is returned may be wrong, and is to be checked.
    """
    latent = arguments.tensors().get(plan.latent)
    if latent is None or not latent.is_floating_point() or len(set(ranges)) != 1:
        return None
    (first, *_), source = ranges, plan.blocks[0].origin
    if latent.ndim == 3 and latent.shape[1] == first.num_tokens and first.in_order:
        return LatentBands(-2, first.sizes)
    found = None if source is None else _rows(source, first)
    return found if found is not None and found.cuts(latent.shape) else None


def _rows(source: GridSource, ranges: TokenRanges) -> LatentBands | None:
    """Return bands of whole rows or frames."""
    if ranges.grid is None or not source.dims or ranges.across.columns != ranges.grid.columns:
        return None
    index = -2 if ranges.across.rows is None else -3
    if len(source.dims) < -index:
        return None
    sizes = [(stop - start) * source.patches[index] for start, stop in pairwise(ranges.starts)]
    return LatentBands(source.dims[index], tuple(sizes))


class PredictionBands:
    """The prediction of one call, of that form. On all stages but the last its messages are received from now on."""

    def __init__(self, mesh: AxisComm, bands: LatentBands, form: OutputStructure) -> None:
        (self._comm, self._axis), self._bands, self._form = mesh, bands, form
        self._last = self._axis.after is None
        self._parts: dict[int, Tensor] = {}
        self.works: list[Work[list[Received]]] = []
        if not self._last:
            self.works = [self._receive(piece) for piece in range(len(bands.sizes))]

    def _receive(self, piece: int) -> Work[list[Received]]:
        shape, dtype, _ = self._form.tensors[0]
        found = list(shape)
        found[self._bands.dim] = self._bands.sizes[piece]
        spec = TensorSpec(tuple(found), dtype)
        return self._exchanged(piece, ExchangePart(OUTPUT, (), {self._axis.ranks[-1]: (spec,)}, axis=self._axis))

    def _exchanged(self, piece: int, part: ExchangePart) -> Work[list[Received]]:
        return self._comm.exchange(f"prediction of piece {piece}", [part], bulk=True)

    def add(self, piece: int, output: Any) -> None:
        """Send the band of a piece, if this is the last stage; `output` is that of the piece's pass."""
        if not self._last:
            return
        part = self._bands.of(tensors_in(output)[0], piece).detach().clone(memory_format=torch.contiguous_format)
        self._parts[piece] = part
        outgoing = [(self._axis.ranks[:-1], (part,))]
        self.works.append(self._exchanged(piece, ExchangePart(OUTPUT, outgoing, {}, axis=self._axis)))

    def output(self) -> Any:
        """Return the network's output, whose bands are fetched when they are needed."""
        shape, dtype, stride = self._form.tensors[0]
        void = torch.empty_strided(shape, stride, dtype=dtype, device=self._comm.transport.device).fill_(torch.nan)
        return with_tensors(self._form.tree, [BandedTensor.of(void, self._bands.dim, self._bands.sizes, self._fetch)])

    def _fetch(self, piece: int) -> Tensor:
        if not self._last and piece not in self._parts:
            (received,) = self.works[piece].wait()
            (self._parts[piece],) = received[self._axis.ranks[-1]]
        return self._parts[piece]
