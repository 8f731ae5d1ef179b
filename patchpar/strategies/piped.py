"""Piped stages: PipeFusion (Fang et al. 2024, arXiv:2405.14430), with corrected keys and values, and text once.

The blocks of a transformer are divided between stages. After the exact steps its tokens are computed in pieces, which
go from stage to stage one after the other, so that all stages work at the same time. A piece attends to keys and
values of this step of the pieces before it, and of the last step of those after it. Ours: these are extrapolated and
corrected by how the piece itself has changed, which sends nothing; and text is computed with the first piece only,
where the paper's code computes it with every piece.

axis        stage
exchanged   hidden states of a piece between two stages; the prediction
when        hidden states fresh; keys and values of later pieces stale, after exact steps
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from patchpar.errors import UnsupportedModel
from patchpar.plan.exchange_policy import ExchangePolicy, StaleKV, check_choice, check_count, check_warmup
from patchpar.plan.scalars import make_plain
from patchpar.strategies.strategy import PatchStrategy

if TYPE_CHECKING:
    from torch import nn

    from patchpar.comm.collectives import Communicator
    from patchpar.plan.mesh import Axis

BOTH = "affine+extrapolation"


@dataclass(frozen=True, slots=True, kw_only=True)
class PipedStages(PatchStrategy):
    """Pieces of a transformer's tokens, computed by stages one after the other.

    `pieces`: how many; with more, less of a step is spent waiting for the first and the last stage, and more keys are
    stale. `warmup_steps`: exact steps at the beginning, the first included. `correction` of stale keys and values:
    "extrapolation": linearly from the last two steps; "affine": a scale and a shift for each channel, fitted to the
    piece that is computed; both; or "none". `text`: computed "once" in a step, or with "each" piece. Raises PlanError.
    """

    name: ClassVar[str] = "piped"
    axis: ClassVar[str] = "stage"
    pieces: int = 4
    warmup_steps: int = 1
    correction: Literal["affine+extrapolation", "affine", "extrapolation", "none"] = "affine+extrapolation"
    text: Literal["once", "each"] = "once"

    def __post_init__(self) -> None:
        make_plain(self)
        check_count(self.name, "pieces", self.pieces)
        check_warmup(self.name, self.warmup_steps)
        check_choice(self.name, "correction", self.correction, (BOTH, "affine", "extrapolation", "none"))
        check_choice(self.name, "text", self.text, ("once", "each"))

    @property
    def policy(self) -> ExchangePolicy:
        """Stale keys and values, corrected on this rank."""
        kinds = self.correction.split("+")
        context = StaleKV(extrapolated="extrapolation" in kinds, correction="affine" if "affine" in kinds else "none")
        return ExchangePolicy(name=self.name, warmup_steps=self.warmup_steps, context=context)

    def install(
        self, denoiser: nn.Module, comm: Communicator, axis: Axis, *, split: str = "auto", **options: Any
    ) -> Any:
        """Return `denoiser` computed in pieces by the stages of `axis`. Raises UnsupportedModel for other networks.

        `split` is of bands, which there are none of. `options`: the `clock`, and `verifications` if it is verified.
        """
        from patchpar.shard.piped.denoiser import PipedDenoiser
        from patchpar.shard.piped.on_stages import PipedOnStages
        from patchpar.shard.unet.discover import splits_into_bands

        if splits_into_bands(denoiser):
            raise UnsupportedModel(
                f"strategy {self.name} computes a transformer's tokens in pieces, but {type(denoiser).__name__} is a "
                "network of convolutions: use strategy=exact, whose stages it can be divided into"
            )
        kind = PipedDenoiser if axis.size == 1 else PipedOnStages
        return kind(denoiser, (comm, axis), self.policy, pieces=self.pieces, text_once=self.text == "once", **options)
