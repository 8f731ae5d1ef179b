"""The header `Warning` (RFC 7234, section 5.5): fields of a request that do nothing, or not with all of their text."""

from patchpar.serving.image_call import takes_prompt
from patchpar.serving.pipeline_fields import PipelineFields
from patchpar.serving.service import ImageService

QUALITY = '299 patchpar "quality is ignored: give num_inference_steps"'
PROMPT = '299 patchpar "prompt is ignored: this model takes none"'


def warning_of(service: ImageService, wanted: PipelineFields) -> dict[str, str]:
    """Return the header of the response to a request; none where all its fields are used as they are."""
    quality = getattr(wanted, "quality", None)
    is_used = quality in service.served.quality_steps and wanted.num_inference_steps is None
    found = [] if is_used or quality in (None, "auto") else [QUALITY]
    found += _unused_tokens(service, wanted) if takes_prompt(service.generator.description) else [PROMPT]
    return {"Warning": ", ".join(found)} if found else {}


def _unused_tokens(service: ImageService, wanted: PipelineFields) -> list[str]:
    """Return a warning for each text that is longer than the text encoders take."""
    tokens = service.generator.tokens
    texts = {"prompt": wanted.prompt, "negative_prompt": wanted.negative_prompt or ""}
    found = {} if tokens is None else {name: tokens.unused(text) for name, text in texts.items()}
    return [f'299 patchpar "{name} {unused}"' for name, unused in found.items() if unused]
