"""Messages between a session and its ranks while a stream runs.

first rank --- BlockReady(block) -----> session        request for the next order; LostStage before it, if it is new
session ------ BeginBlock, EndStream -> first rank     when there is audio and credit, and the stream is not paused
session ------ CancelStream ----------> every rank     further blocks are not computed
last rank ---- ProducedBlock ---------> session
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_args

from torch import Tensor

from patchpar.errors import PlanError
from patchpar.models.streaming.config import LONGEST_PROMPT, MOST_FRAMES
from patchpar.plan.json_fields import text
from patchpar.plan.scalars import is_whole
from patchpar.stream.events import Change, Transition


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptUpdate:
    """Another prompt, as text. The first rank encodes it to a Prompt. Raises PlanError."""

    text: str
    transition: Transition = "switch"
    over: int = 0

    def __post_init__(self) -> None:
        text("prompt", self.text, LONGEST_PROMPT)
        transition, over = self.transition, self.over
        if transition not in get_args(Transition):
            raise PlanError(f"transition={transition!r:.80}: use one of {', '.join(get_args(Transition))}")
        if not is_whole(over, 0, MOST_FRAMES):
            raise PlanError(f"over={over!r:.80}: it must be a whole number of blocks from 0 to {MOST_FRAMES}")
        if (transition == "blend") != (over > 0):
            raise PlanError(
                f"transition={transition!r} with over={over}: use over=1 or more with 'blend', and over=0 otherwise"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceUpdate:
    """Another reference, as an image [height, width, 3] in uint8. The first rank encodes it to a Reference.

    `masks`: [S, height, width] in uint8, 255 where each of S speakers is; None for one speaker, or those before.
    """

    image: Tensor
    masks: Tensor | None = None


Update = Change | PromptUpdate | ReferenceUpdate


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockReady:
    """The first rank can begin this block."""

    block: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BeginBlock:
    """Begin the block that was announced. `inputs`: see AudioInputs, if the model takes audio; none otherwise.

    `frames`: [frames, height, width, 3] in uint8 of a video to start from, or None. `pose`: of a pose video, as many.
    """

    inputs: tuple[Tensor, ...]
    updates: tuple[Update, ...]
    frames: Tensor | None = None
    pose: Tensor | None = None


@dataclass(frozen=True, slots=True)
class EndStream:
    """No further block follows."""


@dataclass(frozen=True, slots=True)
class CancelStream:
    """Drop the blocks in flight."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LostStage:
    """The state of steps `start` to `stop` was lost with a rank, and is empty before block `block`.

    `decodes`: also that of the decoder; with `refills` it decodes the block before once more.
    """

    block: int
    start: int
    stop: int
    decodes: bool = False
    refills: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ProducedBlock:
    """Frames [frames, height, width, 3] in uint8 of one block. `seconds`: since its first step began.

    `sink`: latents [1, C, 1, H, W] of the first frame, with the first block of a stream only. `lost`: states that were
    lost before it.
    """

    block: int
    frames: Tensor
    seconds: float
    sink: Tensor | None
    lost: tuple[LostStage, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamRun:
    """One run on `ranks` ranks, with latents of `rows` x `columns`, from block `first_block` on (above 0: resumed).

    `keep`: blocks that each stage keeps, to go on when another one has died. `continues`: a run after such a death, in
    which stages keep their state. `settles`: blocks after which a stream can go on so; None if it cannot. `lost`: what
    was lost in a run that is repeated. `strength`: the first noise level, 0 to 1, if it is not that of the model.
    `has_pose`: blocks come with frames of a pose video. `speakers`: voices, each with a part of the image.
    `negative`, `guidance_scale`: of a FIFO stream, its negative prompt and scale; 1 for no guidance.
    """

    ranks: int
    seed: int
    rows: int
    columns: int
    first_block: int
    adapt_sink: bool
    keep: int = 0
    continues: bool = False
    settles: int | None = None
    lost: tuple[LostStage, ...] = ()
    strength: float | None = None
    has_pose: bool = False
    speakers: int = 1
    negative: str = ""
    guidance_scale: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageRequest:
    """One image to generate: arguments of the pipeline, and the seed of its generator."""

    number: int
    arguments: Mapping[str, Any]
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratedImage:
    """A finished image: the first of those that the pipeline returned."""

    number: int
    image: Any
