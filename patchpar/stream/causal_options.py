"""Block and window sizes of a block-causal stream. No torch, so that a caller need not import it."""

from dataclasses import dataclass
from typing import Literal

from patchpar.errors import PlanError
from patchpar.plan.scalars import make_plain
from patchpar.stream.json_fields import whole

MOST_FRAMES = 2**16
PositionPolicy = Literal["abs", "relative"]
HistoryPolicy = Literal["noisy", "clean"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CausalOptions:
    """Block size, attention window and sink of a stream. Raises PlanError.

    `frames`: latent frames per block. `window`: blocks that a block attends to, itself included. `sink_distance`:
    position of the sink in latent frames after the block's first one; negative for before. `positions`: the window
    stores rotated keys ("abs"), or keys are rotated at each read ("relative"), see `causal.attention_passes`.
    `history`: each step attends to earlier blocks at its own noise level ("noisy"), or all steps attend to finished
    blocks ("clean"), see `causal.clean_history`; as the model was trained.
    """

    frames: int = 3
    window: int = 4
    sink_distance: int = 8
    positions: PositionPolicy = "abs"
    history: HistoryPolicy = "noisy"

    def __post_init__(self) -> None:
        make_plain(self)
        for name in ("frames", "window"):
            whole(name, getattr(self, name), 1, MOST_FRAMES)
        whole("sink_distance", self.sink_distance, -MOST_FRAMES, MOST_FRAMES)
        if self.positions not in ("abs", "relative"):
            raise PlanError(f"positions={self.positions!r}: use 'abs' or 'relative'")
        if self.history not in ("noisy", "clean"):
            raise PlanError(f"history={self.history!r}: use 'noisy' or 'clean'")
