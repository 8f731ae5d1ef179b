"""Initial values of the fields of an image: those of a distilled model, or the defaults of the pipeline's call."""

from dataclasses import dataclass

from patchpar.models.files import EMBEDDED
from patchpar.models.info import PipelineInfo

from .requests import MAX_STEPS, MIN_SIDE

UNKNOWN_SIDE = 1024  # pixels, of a model that has not been loaded or does not say


@dataclass(frozen=True, slots=True, kw_only=True)
class Defaults:
    """Sizes in pixels; those of images are multiples of `grid`."""

    height: int = UNKNOWN_SIDE
    width: int = UNKNOWN_SIDE
    steps: int = 20
    guidance: float = 4.0
    grid: int = 8

    def times(self, factor: int) -> tuple[int, int]:
        """Height and width in pixels, `factor` times as large."""
        return factor * self.height, factor * self.width


def defaults_before(model: str) -> Defaults:
    """Before the model is loaded. Those of the embedded models are known, whatever their pipeline's class declares."""
    return Defaults(height=256, width=256) if model in EMBEDDED else Defaults()


def defaults_of(model: str, description: PipelineInfo | None) -> Defaults:
    """After loading: those of a model distilled to few steps, or of the pipeline's call; the size it was trained at."""
    before = defaults_before(model)
    if description is None or model in EMBEDDED:
        return before
    height, width = description.size({}) or (UNKNOWN_SIDE, UNKNOWN_SIDE)
    few = description.few_steps
    steps, guidance = (description.parameters.get(name) for name in ("num_inference_steps", "guidance_scale"))
    if few is not None:
        steps, guidance = few.steps, few.guidance
    return Defaults(
        height=max(MIN_SIDE, height),
        width=max(MIN_SIDE, width),
        steps=min(steps, MAX_STEPS) if isinstance(steps, int) else before.steps,
        guidance=float(guidance) if isinstance(guidance, (int, float)) else before.guidance,
        grid=description.size_unit,
    )
