"""Wuerstchen, Stable Cascade and aMUSEd.

Of several prompts nothing is tried where diffusers fails: aMUSEd takes one generator, a decoder of Wuerstchen one
prompt.
"""

from __future__ import annotations

from tests.tiny import cascade_pipelines as cascade
from tests.tiny import sample_images

from .entry import Entry, builder

_IMAGE = {"image": sample_images.scene(64, 64), "strength": 0.9}
_MASKED = _IMAGE | {"mask_image": sample_images.mask(64, 64)}


ENTRIES = (
    Entry(name="WuerstchenPriorPipeline", build=cascade.wuerstchen_prior, output_type="pt"),
    Entry(name="WuerstchenDecoderPipeline", build=cascade.wuerstchen_decoder, prompts=""),
    Entry(name="WuerstchenCombinedPipeline", build=cascade.wuerstchen, prompts=""),
    Entry(name="StableCascadePriorPipeline", build=cascade.cascade_prior, output_type="pt"),
    Entry(name="StableCascadeDecoderPipeline", build=cascade.cascade_decoder, prompts=""),
    Entry(name="StableCascadeCombinedPipeline", build=cascade.cascade),
    Entry(name="AmusedPipeline", build=cascade.amused, prompts=""),
    Entry(name="AmusedImg2ImgPipeline", build=builder(cascade.amused, "AmusedImg2ImgPipeline", _IMAGE), prompts=""),
    Entry(name="AmusedInpaintPipeline", build=builder(cascade.amused, "AmusedInpaintPipeline", _MASKED), prompts=""),
)
