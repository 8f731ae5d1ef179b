"""Kandinsky 2 and 3: priors, decoders, and pipelines made of both."""

from __future__ import annotations

from collections.abc import Callable

from tests.tiny import kandinsky_pipelines as kandinsky
from tests.tiny import sample_images

from .entry import Built, Entry, builder, changed, derived

_IMAGE = {"image": sample_images.scene(64, 64), "strength": 0.9}
_MASKED = {"image": sample_images.scene(64, 64), "mask_image": sample_images.mask(64, 64)}


def _masked(source: Callable[[], Built], name: str) -> Callable[[], Built]:
    """The latent, the masked image and the mask are nine channels."""

    def build() -> Built:
        return derived(source, name, _MASKED, unet=changed(source()[0].unet, in_channels=9))

    return build


_FIRST, _FIRST_COMBINED = kandinsky.kandinsky21, kandinsky.kandinsky21_combined
_SECOND_COMBINED, _CONTROLNET = kandinsky.kandinsky22_combined, kandinsky.kandinsky22_controlnet
_WITH_PROMPT: dict[str, Callable[[], Built]] = {
    "KandinskyCombinedPipeline": _FIRST_COMBINED,
    "KandinskyImg2ImgCombinedPipeline": builder(_FIRST_COMBINED, "KandinskyImg2ImgCombinedPipeline", _IMAGE),
    "KandinskyInpaintCombinedPipeline": _masked(_FIRST_COMBINED, "KandinskyInpaintCombinedPipeline"),
    "KandinskyPriorPipeline": kandinsky.prior21,
    "KandinskyV22PriorPipeline": kandinsky.prior22,
    "KandinskyV22PriorEmb2EmbPipeline": builder(kandinsky.prior22, "KandinskyV22PriorEmb2EmbPipeline", _IMAGE),
    "KandinskyV22CombinedPipeline": _SECOND_COMBINED,
    "KandinskyV22Img2ImgCombinedPipeline": builder(_SECOND_COMBINED, "KandinskyV22Img2ImgCombinedPipeline", _IMAGE),
    "KandinskyV22InpaintCombinedPipeline": _masked(_SECOND_COMBINED, "KandinskyV22InpaintCombinedPipeline"),
    "Kandinsky3Pipeline": kandinsky.kandinsky3,
    "Kandinsky3Img2ImgPipeline": kandinsky.kandinsky3_img2img,
}
_WITH_EMBEDDING: dict[str, Callable[[], Built]] = {
    "KandinskyPipeline": _FIRST,
    "KandinskyImg2ImgPipeline": builder(_FIRST, "KandinskyImg2ImgPipeline", _IMAGE),
    "KandinskyInpaintPipeline": _masked(_FIRST, "KandinskyInpaintPipeline"),
    "KandinskyV22Pipeline": kandinsky.kandinsky22,
    "KandinskyV22Img2ImgPipeline": kandinsky.kandinsky22_img2img,
    "KandinskyV22InpaintPipeline": kandinsky.kandinsky22_inpaint,
    "KandinskyV22ControlnetPipeline": _CONTROLNET,
    "KandinskyV22ControlnetImg2ImgPipeline": builder(_CONTROLNET, "KandinskyV22ControlnetImg2ImgPipeline", _IMAGE),
}
"""What they draw is said by the embedding of one image."""

ENTRIES = (
    *(Entry(name=name, build=build) for name, build in _WITH_PROMPT.items()),
    *(Entry(name=name, build=build, prompts="") for name, build in _WITH_EMBEDDING.items()),
)
