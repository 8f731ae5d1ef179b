"""Configuration of FIFO streaming (FIFO-Diffusion, arXiv:2405.11473)."""

from dataclasses import dataclass, field

from patchpar.errors import PlanError
from patchpar.stream.fifo.queue import FifoOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class FifoConfig:
    """How a model of short videos is streamed. Defaults are those of Wan 2.1 at 480p. Raises PlanError.

    `fps`: frames per second. `height`, `width`: pixels. `queue`: windows and noise levels. `text_tokens`: maximum
    tokens of a prompt.
    """

    fps: float = 16.0
    height: int = 480
    width: int = 832
    queue: FifoOptions = field(default_factory=FifoOptions)
    text_tokens: int = 512

    def __post_init__(self) -> None:
        for name in ("fps", "height", "width", "text_tokens"):
            if getattr(self, name) <= 0:
                raise PlanError(f"{name}={getattr(self, name)}: it must be above 0")
