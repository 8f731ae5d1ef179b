"""Changes in the middle of a stream, and their serialization: each is sent with the block from which it holds.

A change passes from rank to rank before its block, so that every denoising step applies it at the same block and the
pipeline is neither drained nor restarted.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import torch
from torch import Tensor

from patchpar.errors import PlanError
from patchpar.launch import messages
from patchpar.plan.scalars import is_number
from patchpar.shard.host_memory import to_host

Transition = Literal["switch", "cut", "blend", "recache"]
PARAMETERS = ("audio_scale",)
MAX_VALUE = 1e4
"""Of a parameter: beyond it a model in half precision has no numbers left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """Another prompt, as embeddings [1, T, D]. `negative`: embeddings of the negative prompt, with guidance only.

    `transition`: "switch" keeps the window; "cut" clears it; "blend" interpolates linearly to the new prompt in `over`
    blocks; "recache" recomputes the window with the new prompt (LongLive, arXiv:2509.22622, section 3.2).
    """

    text: Tensor
    transition: Transition = "switch"
    over: int = 0
    negative: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """Another sink [1, C, 1, H, W].

    `video`: latents [1, C, F, H, W] of the image and grey images, for image-to-video, or of the still image, for
    models with speech. None keeps those before. `masks`: where each of S speakers is in the image, 0 to 1, by patches
    [S, rows, columns]; None keeps those before.
    """

    latents: Tensor
    video: Tensor | None = None
    masks: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """Another value of one of PARAMETERS. "audio_scale": factor of the audio attention, 1 in training.

    Raises PlanError for an unknown name, and a value that is no finite number.
    """

    name: str
    value: float

    def __post_init__(self) -> None:
        if self.name not in PARAMETERS:
            raise PlanError(f"parameter {self.name!r:.80} is unknown: use one of {', '.join(PARAMETERS)}")
        if not is_number(self.value, -MAX_VALUE, MAX_VALUE):
            raise PlanError(f"{self.name}={self.value!r:.80}: it must be a number from {-MAX_VALUE:g} to {MAX_VALUE:g}")


Change = Prompt | Reference | Parameter


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


@dataclass(frozen=True, slots=True, kw_only=True)
class StepConditions:
    """What changes have made of a StepState. `text`: [1, T, D]. `sink`: [1, C, 1, H, W]. Others: see Reference."""

    text: Tensor
    sink: Tensor | None = None
    blending: PromptBlend | None = None
    video: Tensor | None = None
    masks: Tensor | None = None
    audio_scale: float = 1.0

    def prompted(self, text: Tensor, change: Prompt) -> "StepConditions":
        """Return the same with another text [1, T, D] for `change`, at once or in a blend. Raises PlanError."""
        if change.transition == "blend":
            return replace(self, blending=PromptBlend(start=self.text, end=text, over=change.over))
        return replace(self, text=text, blending=None)

    def advanced(self) -> "StepConditions":
        """Return the same one block later, where the text is being blended."""
        if self.blending is None:
            return self
        blend = replace(self.blending, done=self.blending.done + 1)
        text = torch.lerp(blend.start, blend.end, blend.done / blend.over)
        return replace(self, text=text, blending=None if blend.done == blend.over else blend)

    def each(self, move: Callable[[Tensor], Tensor]) -> "StepConditions":
        """Return the same with `move` of every tensor."""
        blend, known = self.blending, {field.name: getattr(self, field.name) for field in fields(self)}
        moved: dict[str, Any] = {name: move(x) for name, x in known.items() if isinstance(x, Tensor)}
        if blend is not None:
            moved["blending"] = replace(blend, start=move(blend.start), end=move(blend.end))
        return replace(self, **moved)


def pack(plain: Any) -> Tensor:
    """Serialize changes, and other plain objects, to bytes [N] in uint8, for one message."""
    return torch.frombuffer(bytearray(messages.pack(messages.encode(plain))), dtype=torch.uint8)


def unpack(data: Tensor) -> Any:
    """Restore the objects of `pack` from bytes [N] in uint8. Tensors are on the CPU."""
    return messages.unpack(to_host(data).numpy().tobytes())
