"""What a session and the ranks say to one another while a stream runs.

first rank --- BlockReady(block) -----> session        what is to be done?
session ------ BeginBlock, EndStream -> first rank     when there is audio, credit, and nobody has paused
session ------ CancelStream ----------> every rank     from now on nothing is computed
last rank ---- ProducedBlock ---------> session
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from patchpar.stream.events import Change, Transition, check_transition


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptUpdate:
    """Another prompt, as text. The first rank makes a Prompt of it."""

    text: str
    transition: Transition = "switch"
    over: int = 0

    def __post_init__(self) -> None:
        check_transition(self.transition, self.over)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceUpdate:
    """Another reference, as an image (height, width, 3) in uint8. The first rank makes a Reference of it."""

    image: Tensor


Update = Change | PromptUpdate | ReferenceUpdate


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockReady:
    """The first rank can begin this block."""

    block: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BeginBlock:
    """Begin the block that was announced. `inputs`: audio tokens (1, F, n, C), if the model hears."""

    inputs: tuple[Tensor, ...]
    updates: tuple[Update, ...]


@dataclass(frozen=True, slots=True)
class EndStream:
    """There is no further block."""


@dataclass(frozen=True, slots=True)
class CancelStream:
    """Nobody wants what is under way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProducedBlock:
    """Frames (frames, height, width, 3) in uint8 of one block. `seconds`: since its first step began.

    `sink`: the latents of the first frame, with the first block of a stream only.
    """

    block: int
    frames: Tensor
    seconds: float
    sink: Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamRun:
    """One run of the stages on `ranks` ranks, with latents of `rows` x `columns`.

    `first_block`: where an interrupted stream goes on.
    """

    ranks: int
    seed: int
    rows: int
    columns: int
    first_block: int
    adapt_sink: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What a session must know of a model. `audio` is the model's AudioConfig, or None if it hears nothing.

    `starts_from_image`: it cannot begin without a reference. `late`: latent frames that have to come, at most, before
    the images of one are decoded.
    """

    audio: Any
    per_latent: int
    spatial: int
    takes_prompt: bool
    starts_from_image: bool = False
    late: int = 0
