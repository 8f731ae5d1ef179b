"""Pieces of tokens that pass through stages: each stage runs its blocks on one piece after the other.

    stage 0    piece 0    piece 1    piece 2    piece 3    piece 0 of the next step, whose prediction has arrived
    stage 1               piece 0    piece 1    piece 2    piece 3    piece 0 of the next step

In an exact step the whole image passes through the stages as without pieces. Keys and values of pieces stay on the
stage whose blocks they are of. What a stage sends of a piece has a shape that all know, found at the first call.

The last stage sends each piece's band of the prediction to all. A call returns before these have arrived: what the
pipeline computes of the prediction is a `BandedTensor`, and the next call asks for the band of each piece before it
computes the piece. So no stage waits for the last piece of a step.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from patchpar.comm.banded_tensor import BandedTensor, whole_of
from patchpar.comm.exchange_part import collectives_of
from patchpar.comm.pytree import leaves, map_leaves, tensors_in
from patchpar.comm.transport import Work
from patchpar.errors import UnsupportedModel
from patchpar.shard.piped.denoiser import PipedDenoiser
from patchpar.shard.piped.latent_bands import LatentBands, PredictionBands, bands_of
from patchpar.shard.piped.piece_split import PieceSplit, TextRanges
from patchpar.shard.stages.block_hooks import Recorder
from patchpar.shard.stages.denoiser import StagedDenoiser
from patchpar.shard.stages.layout import StageLayout
from patchpar.shard.transformer.attention_backend import BackendKernel
from patchpar.shard.transformer.probe.capture import CallArguments
from patchpar.shard.transformer.probe.latent import is_latent
from patchpar.shard.transformer.token_plan import NotWatched
from patchpar.shard.verification import (
    Call,
    Comparison,
    Forward,
    call_signature,
    every_rank_has,
    is_alike,
    relative_error,
    rounding_limit,
    verify_once,
)

CALLS_IN_FLIGHT = 4  # whose messages are waited for later; guidance makes two or three calls in a step
LOOSE = 10  # times the tolerance of a verification: what is looked for is NaN, and rows of another piece


@dataclass(frozen=True, slots=True)
class PieceLayouts:
    """How calls of a `signature` are divided between stages: whole ones, and those of each piece.

    `bands`: of the latent and the prediction; None where a prediction is not made of a band for each piece.
    """

    signature: Any
    whole: StageLayout
    of_pieces: tuple[StageLayout, ...] = ()
    bands: LatentBands | None = None


@dataclass(eq=False, repr=False, kw_only=True)
class PipedOnStages(PipedDenoiser):
    """A `PipedDenoiser` whose blocks are divided between the ranks of its axis. All of them call each method together.

    At the first call of a form every rank runs the network whole, and in pieces, to find the shapes of messages.
    `in_bands`: predictions may be returned before they have arrived.
    """

    in_bands: bool = True
    stages: StagedDenoiser = field(init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.stages = StagedDenoiser(self.denoiser, self.mesh, self.verifications)
        self._known: list[PieceLayouts] = []
        self._now: PieceLayouts | None = None  # of the running call
        self._in_flight: deque[list[Work[Any]]] = deque()

    def denoise(self, forward: Forward, /, *args: Any, **kwargs: Any) -> Any:
        """Run one denoiser call; `forward` is the denoiser's own. Returns its output for the whole image.

        Raises UnsupportedModel, VerificationError, PlanError, ExchangeError.
        """
        self._make_sure()
        self.stages.unsure = False
        signature = call_signature((args, kwargs))
        known = next((each for each in self._known if each.signature == signature), None)
        args, kwargs = self._awaited(args, kwargs, None if known is None else known.bands)
        whole = self.stages.layout_for(forward, (args, kwargs))
        if known is None:
            self.stages.gather()  # it may know such calls from a comparison
        self._now = known or PieceLayouts(signature, whole)
        return super().denoise(forward, *args, **kwargs)

    def _awaited(self, args: Any, kwargs: Any, bands: LatentBands | None) -> Call:
        """Return the arguments with every banded tensor whole, but for a latent in the bands of the pieces."""
        if not any(isinstance(x, BandedTensor) for x in leaves((args, kwargs))):
            return args, kwargs

        def whole(name: str, leaf: Any) -> Any:
            if not isinstance(leaf, BandedTensor):
                return leaf
            latent = self.plan is not None and is_latent(name, self.plan.latent)
            return leaf if latent and bands is not None and leaf.bands == (bands.dim, bands.sizes) else leaf.whole()

        found = CallArguments.of(self.denoiser, args, kwargs).map(whole)
        return found.args, found.kwargs

    # --- the first call of a signature --------------------------------------------------------------------------

    def _prepare(
        self,
        forward: Forward,
        call: Call,
        signature: Any,
        kernel: BackendKernel | None,
        unforeseen: NotWatched | None = None,
    ) -> None:
        if unforeseen is not None:
            raise UnsupportedModel(
                f"{unforeseen} Stages hold only a part of the weights now: use strategy=exact"
            ) from unforeseen
        super()._prepare(forward, call, signature, kernel)
        assert self._now is not None
        self._now = self._with_pieces(self._now, forward, CallArguments.of(self.denoiser, *call))
        self._known = [each for each in self._known if each.signature != signature] + [self._now]

    def _with_pieces(self, known: PieceLayouts, forward: Forward, call: CallArguments) -> PieceLayouts:
        """Return how the pass of each piece is divided, after running all of them here, each with its band alone."""
        assert self._shard is not None
        assert self.plan is not None
        found, parts, own = [], [], call.cloned()
        with torch.no_grad(), self._other_memory() as cache:
            cache.begin(0, 0, None)
            wanted = tensors_in(self._whole_here(forward, *own.args, **own.kwargs))
            cache.begin(0, 1, None)
            bands = self._bands(call, wanted)
            for piece in range(self.pieces):
                own = call.cloned() if bands is None else bands.alone(call.cloned(), self.plan.latent, piece)
                recorder = Recorder(self.denoiser)
                output = tensors_in(self._piece(piece, self.stages.through(recorder, forward), *own.args, **own.kwargs))
                found.append(replace(known.whole, calls=tuple(recorder.calls)))
                parts += [] if bands is None else [bands.of(output[0], piece).clone()]
        right = bands is not None and _is_joined_from(parts, bands.dim, output[0], wanted[0])
        if not is_alike(self.mesh, "pieces", str([(call.path, call.form) for each in found for call in each.calls])):
            raise UnsupportedModel(
                f"the ranks compute different pieces of {type(self.denoiser).__name__}: give all of them the same "
                "model, and devices of the same kind"
            )
        bands = bands if every_rank_has(self.mesh, "bands", right) else None
        prepared = replace(known, of_pieces=tuple(found), bands=bands)
        self._verify(prepared, forward, call, wanted)
        return prepared

    def _verify(self, known: PieceLayouts, forward: Forward, call: CallArguments, wanted: list[Tensor]) -> None:
        """Compare pieces that pass through the stages with a whole call. Raises VerificationError."""
        if self.verifications is None:
            return
        facts = self._facts((call.args, call.kwargs)) | {"stages": self.mesh[1].size, "cuts": str(known.whole)}
        what = f"{type(self.denoiser).__name__} in {self.pieces} pieces that pass through {self.mesh[1].size} stages"
        compare = partial(self._compared, known, forward, call, wanted)
        verify_once(self.verifications, facts, self.mesh, compare, what, ": use strategy=exact")

    def _compared(
        self, known: PieceLayouts, forward: Forward, call: CallArguments, wanted: list[Tensor]
    ) -> Iterator[list[Comparison]]:
        """Run an exact step and one in pieces with the same input, without the weights of other stages."""
        own, self._now = call.cloned(), known
        with torch.no_grad(), self._other_memory() as cache, self.stages.as_released(known.whole):
            cache.begin(0, 0, None)
            self._whole(forward, *own.args, **own.kwargs)
            cache.begin(0, 1, None)
            output = map_leaves(whole_of, self._in_pieces(forward, *own.args, **own.kwargs))
        self._hold([], calls=0)
        pairs = [(x, y) for x, y in zip(tensors_in(output), wanted, strict=True) if y.is_floating_point()]
        limit = LOOSE * rounding_limit(y for _, y in pairs)
        yield [Comparison(max(relative_error(x, y) for x, y in pairs), limit)]

    def _bands(self, call: CallArguments, wanted: list[Tensor]) -> LatentBands | None:
        """Return what are probably the bands of pieces, if predictions may come in bands."""
        assert self._shard is not None
        assert self.plan is not None
        split, found = self._shard.split, self._shard.ranges
        assert isinstance(split, PieceSplit)
        ranges = [split.divided(name, each, 0) for name, each in found.items() if not isinstance(each, TextRanges)]
        bands = bands_of(self.plan, ranges, call) if self.in_bands and len(wanted) == 1 else None
        return bands if bands is not None and bands.cuts(wanted[0].shape) else None

    # --- every call ---------------------------------------------------------------------------------------------

    def _whole(self, forward: Forward, *args: Any, **kwargs: Any) -> Any:
        assert self._now is not None
        stage = self.stages.new_pass([self._now.whole])
        through = self.stages.through(stage, forward)
        found = self._whole_here(through, *map_leaves(whole_of, args), **map_leaves(whole_of, kwargs))
        return stage.finish(found)

    def _in_pieces(self, forward: Forward, *args: Any, **kwargs: Any) -> Any:
        now, found = self._now, None
        assert now is not None
        pending = [x for x in leaves((args, kwargs)) if isinstance(x, BandedTensor)]
        args, kwargs = map_leaves(_buffer, args), map_leaves(_buffer, kwargs)
        passes = [self.stages.new_pass([layout], f"piece {piece}") for piece, layout in enumerate(now.of_pieces)]
        comm, axis = self.mesh
        if collectives_of(comm.transport, axis.ranks) is None:  # in one queue, pieces would be sent after all have come
            for each in passes:
                each.receive()
        prediction = None if now.bands is None else PredictionBands(self.mesh, now.bands, now.whole.output)
        for piece, each in enumerate(passes):
            for x in pending:
                x.band(piece)
            found = self._piece(piece, self.stages.through(each, forward), *args, **kwargs)
            if prediction is not None:
                prediction.add(piece, found)
        sent = [work for each in passes for work in each.sent]
        if prediction is None:
            output = passes[-1].finish(found)
            self._hold(sent, calls=0)
            return output
        self._hold([*sent, *prediction.works], calls=CALLS_IN_FLIGHT)
        return prediction.output()

    def _hold(self, works: list[Work[Any]], *, calls: int) -> None:
        """Keep messages in flight, and wait for those of all but the last `calls` calls. Raises ExchangeError."""
        self._in_flight.append(works)
        while len(self._in_flight) > calls:
            for work in self._in_flight.popleft():
                work.wait()

    # --- begin and end ------------------------------------------------------------------------------------------

    def reset(self) -> None:
        """Begin an image: nothing of the last one is used. Raises ExchangeError."""
        self._hold([], calls=0)
        self.stages.reset()
        super().reset()

    def finish(self) -> None:
        """End an image: wait for predictions that nobody has used. Raises ExchangeError."""
        self._hold([], calls=0)
        super().finish()

    def restore(self) -> None:
        """Leave the denoiser as it was, bit for bit. Idempotent. Collective.

        Raises PlanError, with nothing changed, where whole weights do not fit a device. Raises ExchangeError.
        """
        self._hold([], calls=0)
        self.stages.restore()
        super().restore()
        self._known.clear()


def _buffer(x: Any) -> Any:
    return x.buffer if isinstance(x, BandedTensor) else x


def _is_joined_from(parts: Sequence[Tensor], dim: int, joined: Tensor, whole: Tensor) -> bool:
    """Whether a prediction is made of these bands, and they are those of a whole call but for rounding."""
    tolerance = LOOSE * rounding_limit([whole])
    return torch.equal(torch.cat(list(parts), dim), joined) and relative_error(joined, whole) <= tolerance
