"""What changes make of the state of a denoising step: prompt, sink and so on."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from patchpar.errors import PlanError
from patchpar.shard.host_memory import to_host

TENSORS = ("text", "sink", "video", "masks")
"""Fields of StepConditions that are tensors, or None."""


@dataclass(frozen=True, slots=True, kw_only=True)
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

    @property
    def text(self) -> Tensor:
        """The embeddings of the last of these blocks, [1, T, D]."""
        return torch.lerp(self.start, self.end, self.done / self.over)

    def advanced(self) -> "PromptBlend":
        """Return it one block later."""
        return replace(self, done=self.done + 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepConditions:
    """What changes have made of a StepState. `text`: [1, T, D]. `sink`: [1, C, 1, H, W]. Others: see Reference."""

    text: Tensor
    sink: Tensor | None = None
    blending: PromptBlend | None = None
    video: Tensor | None = None
    masks: Tensor | None = None
    audio_scale: float = 1.0

    def each(self, move: Callable[[Tensor], Tensor]) -> "StepConditions":
        """Return the same with `move` of every tensor."""
        blend = self.blending
        moved: dict[str, Any] = {name: move(x) for name in TENSORS if (x := getattr(self, name)) is not None}
        if blend is not None:
            moved["blending"] = replace(blend, start=move(blend.start), end=move(blend.end))
        return replace(self, **moved)

    def on_host(self) -> "StepConditions":
        """Return the same with tensors in host memory."""
        return self.each(to_host)
