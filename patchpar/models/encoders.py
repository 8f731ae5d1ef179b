"""The encoders of a pipeline: networks that it calls before the first step, on texts, images or audio it was given."""

from typing import Any

from transformers import PreTrainedModel

from patchpar.models.info import denoisers_of, networks_of

NAMED = ("text_encoder", "image_encoder")
AFTER_THE_STEPS = ("safety_checker", "vocoder", "text_decoder")
"""Networks of transformers that are called on outputs, which not every rank has."""


def encoders_of(pipe: Any) -> dict[str, Any]:
    """Return the networks of a pipeline that encode its inputs, by name: models of transformers, or so named."""
    denoisers = denoisers_of(pipe)
    return {
        name: each
        for name, each in networks_of(pipe).items()
        if name not in denoisers
        and not name.endswith(AFTER_THE_STEPS)
        and (isinstance(each, PreTrainedModel) or any(part in name for part in NAMED))
    }
