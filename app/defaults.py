"""What the fields of a picture begin with: the pipeline's own defaults, as its call and its networks have them."""

from dataclasses import dataclass

from patchpar.models.files import EMBEDDED
from patchpar.models.info import PipelineInfo

from .orders import LEAST_SIDE, MOST_STEPS

UNKNOWN_SIDE = 1024  # pixels, of a model that has not been loaded or does not say


@dataclass(frozen=True, slots=True, kw_only=True)
class Defaults:
    """Sizes in pixels."""

    height: int = UNKNOWN_SIDE
    width: int = UNKNOWN_SIDE
    steps: int = 20
    guidance: float = 4.0

    def times(self, factor: int) -> tuple[int, int]:
        """Height and width of a picture that many times as large."""
        return factor * self.height, factor * self.width


def defaults_before(model: str) -> Defaults:
    """Before the model has been loaded. The embedded ones are known, whatever their pipeline's class says of others."""
    return Defaults(height=256, width=256) if model in EMBEDDED else Defaults()


def defaults_of(model: str, description: PipelineInfo | None) -> Defaults:
    """Once it has been loaded: what its call's signature and the size that it was trained at say."""
    before = defaults_before(model)
    if description is None or model in EMBEDDED:
        return before
    height, width = description.size({}) or (UNKNOWN_SIDE, UNKNOWN_SIDE)
    steps, guidance = (description.parameters.get(name) for name in ("num_inference_steps", "guidance_scale"))
    return Defaults(
        height=max(LEAST_SIDE, height),
        width=max(LEAST_SIDE, width),
        steps=min(steps, MOST_STEPS) if isinstance(steps, int) else before.steps,
        guidance=float(guidance) if isinstance(guidance, (int, float)) else before.guidance,
    )
