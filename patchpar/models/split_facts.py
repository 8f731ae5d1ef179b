"""What decides which plans a model takes, as far as its folder shows it: neither torch nor diffusers is imported."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from patchpar.errors import PlanError
from patchpar.models.info import is_name_of_denoiser
from patchpar.models.model_index import ModelIndex

UNET = "UNet2DConditionModel"


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitFacts:
    """A part of PipelineInfo, see there. Where a model is not known, it may be split in any way."""

    pipeline: str = ""
    denoisers: tuple[str, ...] = ("its denoiser",)
    splits_into_bands: bool = True
    splits_into_tokens: bool = True

    @classmethod
    def of_folder(cls, folder: Path | None, options: Mapping[str, Any]) -> "SplitFacts":
        """Return what a folder, loaded with `options`, shows; None: one that is not here."""
        with suppress(PlanError):  # what is wrong with the index is said when it is loaded
            index = None if folder is None else ModelIndex.read(folder)
            kinds = {} if index is None else {part.name: part.kind for part in index.parts}
            denoisers = [name for name in kinds if is_name_of_denoiser(name)]
            if index is not None and denoisers == ["unet"] and kinds["unet"] == UNET and "unet" not in options:
                return cls(pipeline=str(index.pipeline), denoisers=(f"unet ({UNET})",), splits_into_tokens=False)
        return cls()
