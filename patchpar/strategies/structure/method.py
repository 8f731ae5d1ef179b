"""What structure guidance does, in parts: the whole of a strategy's options as the denoiser needs them."""

from dataclasses import dataclass, field

from patchpar.strategies.structure.structure import Guidance
from patchpar.strategies.structure.windows import Tiling


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """`switch`: the time, from 1 (noise) to 0 (picture), at which interlaced patches give way to windows.

    `structure_strength`: how far windows are drawn to the anchor's structure when they begin; it falls to 0 with the
    time. `guide`: which structure, "anchor" for that of the large latent's own anchor, "flow" for a small picture that
    goes on by itself, see `GuideTrajectory`. `context`: how far windows see of one another, as a share of their sides.
    `native`: the side in pixels that the denoiser was trained for, None for what its configuration says.
    `size_conditioning`: see `PatchInputs`. `bands`: how many neighbouring ranks are a team, see `Schedule`.
    `shared_noise`: the correlation of the patches' first noise. `renoised`: the noise is drawn anew at the switch.
    `seed`: of what is drawn beside the pipeline's own noise.
    """

    guidance: Guidance = field(default_factory=Guidance)
    tiling: Tiling = field(default_factory=Tiling)
    switch: float = 0.35
    structure_strength: float = 1.0
    context: float = 0.0
    bands: int = 1
    guide: str = "anchor"
    native: int | None = None
    size_conditioning: str = "native"
    shared_noise: float = 0.0
    renoised: bool = False
    seed: int = 0

    def progress(self, time: float) -> float:
        """How much of the first stage is behind, at a time within it."""
        return (1 - time) / (1 - self.switch)
