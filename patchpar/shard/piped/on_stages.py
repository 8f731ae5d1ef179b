"""Pieces of tokens that pass through stages: each stage runs its blocks on one piece after the other.

    stage 0    piece 0    piece 1    piece 2    piece 3
    stage 1               piece 0    piece 1    piece 2    piece 3     then the prediction, to all

In an exact step the whole image passes through the stages as without pieces. Keys and values of pieces stay on the
stage whose blocks they are of. What a stage sends of a piece has a shape that all know, found at the first call.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from patchpar.errors import UnsupportedModel
from patchpar.shard.piped.denoiser import PipedDenoiser
from patchpar.shard.stages.answers import AnswerForm
from patchpar.shard.stages.block_hooks import Recorder
from patchpar.shard.stages.denoiser import StagedDenoiser
from patchpar.shard.stages.layout import StageLayout
from patchpar.shard.transformer.attention_backend import BackendKernel
from patchpar.shard.transformer.probe.capture import CallArguments
from patchpar.shard.transformer.token_plan import NotWatched
from patchpar.shard.verification import Call, call_signature, is_alike

Forward = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class PieceLayouts:
    """How calls of a `signature` are divided between stages: whole ones, and those of each piece."""

    signature: Any
    whole: StageLayout
    output: AnswerForm
    of_pieces: tuple[StageLayout, ...]


@dataclass(eq=False, repr=False, kw_only=True)
class PipedOnStages(PipedDenoiser):
    """A `PipedDenoiser` whose blocks are divided between the ranks of its axis. All of them call each method together.

    At the first call of a form every rank runs the network whole, and in pieces, to find the shapes of messages.
    """

    stages: StagedDenoiser = field(init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.stages = StagedDenoiser(self.denoiser, self.mesh, self.verifications)
        self._known: list[PieceLayouts] = []
        self._now: PieceLayouts | None = None  # of the running call

    def denoise(self, forward: Forward, /, *args: Any, **kwargs: Any) -> Any:
        """Run one denoiser call; `forward` is the denoiser's own. Returns its output for the whole image.

        Raises UnsupportedModel, VerificationError, PlanError, ExchangeError.
        """
        self._make_sure()
        self.stages.unsure = False
        whole, output = self.stages.layout_for(forward, (args, kwargs))
        signature = call_signature((args, kwargs))
        known = next((each for each in self._known if each.signature == signature), None)
        if known is None:
            self.stages.gather()  # it may know such calls from a comparison
        self._now = known or PieceLayouts(signature, whole, output, ())
        return super().denoise(forward, *args, **kwargs)

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
        self._now = replace(self._now, of_pieces=self._layouts_of_pieces(self._now.whole, forward, call))
        self._known = [each for each in self._known if each.signature != signature] + [self._now]

    def _layouts_of_pieces(self, whole: StageLayout, forward: Forward, call: Call) -> tuple[StageLayout, ...]:
        """Return how the pass of each piece is divided, after running all of them here."""
        own, found = CallArguments.of(self.denoiser, *call).cloned(), []
        with torch.no_grad(), self._other_memory() as cache:
            cache.begin(0, 0, None)
            self._whole_here(forward, *own.args, **own.kwargs)
            cache.begin(0, 1, None)
            for piece in range(self.pieces):
                recorder = Recorder(self.denoiser)
                self._piece(piece, self.stages.through(recorder, forward), *own.args, **own.kwargs)
                found.append(replace(whole, calls=tuple(recorder.calls)))
        text = str([(call.path, call.form) for layout in found for call in layout.calls])
        if not is_alike(self.mesh, "pieces", text):  # all ranks see it
            raise UnsupportedModel(
                f"the ranks compute different pieces of {type(self.denoiser).__name__}: give all of them the same "
                "model, and devices of the same kind"
            )
        return tuple(found)

    # --- every call ---------------------------------------------------------------------------------------------

    def _whole(self, forward: Forward, *args: Any, **kwargs: Any) -> Any:
        assert self._now is not None
        stage = self.stages.new_pass(self._now.whole)
        found = self._whole_here(self.stages.through(stage, forward), *args, **kwargs)
        return stage.finish(found, self._now.output)

    def _in_pieces(self, forward: Forward, *args: Any, **kwargs: Any) -> Any:
        assert self._now is not None
        layouts, found = self._now.of_pieces, None
        passes = [self.stages.new_pass(layout, f"piece {piece}") for piece, layout in enumerate(layouts)]
        for each in passes:
            each.receive()
        for piece, each in enumerate(passes):
            found = self._piece(piece, self.stages.through(each, forward), *args, **kwargs)
        output = passes[-1].finish(found, self._now.output)
        for each in passes:
            each.wait()
        return output

    # --- begin and end ------------------------------------------------------------------------------------------

    def restore(self) -> None:
        """Leave the denoiser as it was, bit for bit. Idempotent. Collective. Raises ExchangeError."""
        super().restore()
        self._known.clear()
        self.stages.restore()
