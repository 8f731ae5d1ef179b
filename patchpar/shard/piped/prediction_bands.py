"""The prediction of a call in pieces: the last stage sends each piece's band of it to all, who fetch it when needed.

All ranks take part in each exchange, in the queue of what is needed later: they receive before they send their own
outputs to the next stage, which in one queue of NCCL would wait for bands that are made of them.
"""

from typing import Any

import torch
from torch import Tensor

from patchpar.comm.banded_tensor import BandedTensor
from patchpar.comm.collectives import AxisComm
from patchpar.comm.exchange_part import ExchangePart, Received
from patchpar.comm.pytree import tensors_in, with_tensors
from patchpar.comm.transport import TensorSpec, Work
from patchpar.shard.piped.latent_bands import LatentBands
from patchpar.shard.stages.block_outputs import OutputStructure
from patchpar.shard.stages.stage_pass import OUTPUT


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
