"""The options of structure guidance, grouped as the denoiser needs them."""

from dataclasses import dataclass, field

from patchpar.strategies.structure.structure import Guidance
from patchpar.strategies.structure.windows import Tiling


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """`switch`: the time, from 1 (noise) to 0 (image), at which windows replace interlaced patches.

    `structure_strength`: how far windows are moved to the guide's structure at the switch; it falls to 0 with the time.
    `guide`: "anchor" is the anchor of the large latent, "flow" a separate image of native size, see `GuideTrajectory`.
    `context`: how far windows attend to one another, as a fraction of their sides. `native`: the side in pixels that
    the denoiser was trained for, None to read it from its configuration. `size_conditioning`: see `PatchInputs`.
    `bands`: how many neighbouring ranks are a team, see `Schedule`. `shared_noise`: the correlation of the patches'
    initial noise. `renoised`: fresh noise at the switch. `seed`: of all noise except the pipeline's.
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
        """Return the progress through the first stage, 0 to 1, at a time within it."""
        return (1 - time) / (1 - self.switch)
