"""The header `Warning` (RFC 7234, section 5.5): fields of a request that do nothing."""

from patchpar.serving.image_call import takes_prompt
from patchpar.serving.pipeline_fields import PipelineFields
from patchpar.serving.service import ImageService

QUALITY = '299 patchpar "quality is ignored: give num_inference_steps"'
PROMPT = '299 patchpar "prompt is ignored: this model takes none"'


def warning_of(service: ImageService, wanted: PipelineFields) -> dict[str, str]:
    """Return the header of the response to a request; none where all its fields are used."""
    quality = getattr(wanted, "quality", None)
    is_used = quality in service.served.quality_steps and wanted.num_inference_steps is None
    found = [] if is_used or quality in (None, "auto") else [QUALITY]
    found += [] if takes_prompt(service.generator.description) else [PROMPT]
    return {"Warning": ", ".join(found)} if found else {}
