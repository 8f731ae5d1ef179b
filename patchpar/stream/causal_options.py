"""Block and window sizes of a block-causal stream. No torch, so that a caller need not import it."""

from dataclasses import dataclass
from typing import Literal, get_args

from patchpar.errors import PlanError
from patchpar.plan.scalars import make_plain
from patchpar.stream.json_fields import whole

MOST_FRAMES = 2**16
PositionPolicy = Literal["abs", "relative"]
HistoryPolicy = Literal["noisy", "clean", "recompute"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CausalOptions:
    """Block size, attention window and sink of a stream. Raises PlanError.

    `frames`: latent frames per block. `window`: blocks that a block attends to, itself included. `sink_distance`:
    position of the sink in latent frames after the block's first one; negative for before. `positions`: the window
    stores rotated keys ("abs"), or keys are rotated at each read ("relative"), see `causal.attention_passes`. `sinks`:
    blocks of the window that are the stream's first ones for good, see `KVWindow` there. `history`: each step attends
    to earlier blocks at its own noise level ("noisy"), or all steps attend to finished blocks, whose keys and values
    are computed once ("clean") or anew for each block ("recompute"), see `causal.clean_history`; as the model
    was trained.
    """

    frames: int = 3
    window: int = 4
    sink_distance: int = 8
    positions: PositionPolicy = "abs"
    history: HistoryPolicy = "noisy"
    sinks: int = 0

    def __post_init__(self) -> None:
        make_plain(self)
        for name in ("frames", "window"):
            whole(name, getattr(self, name), 1, MOST_FRAMES)
        whole("sink_distance", self.sink_distance, -MOST_FRAMES, MOST_FRAMES)
        if self.positions not in ("abs", "relative"):
            raise PlanError(f"positions={self.positions!r}: use 'abs' or 'relative'")
        if self.history not in get_args(HistoryPolicy):
            raise PlanError(f"history={self.history!r}: use {' or '.join(map(repr, get_args(HistoryPolicy)))}")
        whole("sinks", self.sinks, 0, self.window - 1)
        if self.sinks and self.history == "recompute":
            raise PlanError(f"sinks={self.sinks} with history='recompute', which keeps no keys and values: use sinks=0")

    @property
    def is_pipelined(self) -> bool:
        """Whether the denoising steps of a block can run on different ranks: each needs its own history only."""
        return self.history == "noisy"

    @property
    def extra_passes(self) -> int:
        """Passes of one block through the transformer beside its denoising steps."""
        return {"noisy": 0, "clean": 1, "recompute": self.window - 1}[self.history]
