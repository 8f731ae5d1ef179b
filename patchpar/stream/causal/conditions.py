"""What changes make of the state of a denoising step: prompt, sink and so on."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from patchpar.errors import PlanError
from patchpar.shard.host_memory import to_host


@dataclass(slots=True, kw_only=True)
class PromptBlend:
    """Linear interpolation from one prompt to another, [1, T, D] each; `done` of `over` blocks have been computed.

    Raises PlanError for texts of different shapes.
    """

    start: Tensor
    end: Tensor
    over: int
    done: int = 0

    def __post_init__(self) -> None:
        if self.start.shape != self.end.shape:
            raise PlanError(
                f"a text of {tuple(self.end.shape)} cannot be blended with one of {tuple(self.start.shape)}: use "
                "'switch', or pad both to one length"
            )

    @property
    def is_done(self) -> bool:
        """Whether all blocks have been computed."""
        return self.done == self.over

    def advance(self) -> Tensor:
        """Return the embeddings of the next block, [1, T, D]."""
        self.done += 1
        return torch.lerp(self.start, self.end, self.done / self.over)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepConditions:
    """What changes have made of a StepState."""

    text: Tensor
    sink: Tensor | None
    blending: PromptBlend | None
    video: Tensor | None
    audio_scale: float
    masks: Tensor | None = None

    def on_host(self) -> "StepConditions":
        """Return the same with tensors in host memory."""
        blend = self.blending
        return replace(
            self,
            text=to_host(self.text),
            sink=None if self.sink is None else to_host(self.sink),
            blending=None if blend is None else replace(blend, start=to_host(blend.start), end=to_host(blend.end)),
            video=None if self.video is None else to_host(self.video),
            masks=None if self.masks is None else to_host(self.masks),
        )
