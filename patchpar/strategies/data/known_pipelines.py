"""Pipelines of diffusers whose results for a prompt depend on the other prompts of a call, or on their order."""

from collections.abc import Container, Mapping
from importlib.util import find_spec
from typing import Any

from patchpar.models.info import images_each

REFERENCES = (  # pipelines with several images a prompt
    "Flux2", "QwenImageEditPlus", "QwenImage21", "JoyImageEditPlus", "OmniGen", "BriaFibo", "ZImageOmni", "VisualCloze",
    "LTXCondition",
)  # fmt: skip
MIXED = {
    "CycleDiffusionPipeline": "takes the second of several prompts for a branch of the guidance of the first",
    "HeliosPyramidPipeline": "samples the noise between its stages for all prompts at once",
    "Kandinsky5I2VPipeline": "brings the first frames of each video to the mean of the videos of all prompts",
    "FluxPriorReduxPipeline": "adds up what all images and prompts give",
    "StableDiffusionPanoramaPipeline": "takes the text of one prompt for the branch without text of another",
    "OmniGenPipeline": "gives the texts of all prompts the positions of the first",
    "LTXI2VLongMultiPromptPipeline": "takes several prompts for the parts of one video",
    "StableDiffusionParadigmsPipeline": "goes on by as many steps at once as all prompts allow",
}
MIXED_BY = {  # arguments that make a pipeline mix prompts
    "BriaPipeline": {"normalize": "divides predictions by the standard deviation of those of all prompts"},
}
SAMPLERS = {  # pipelines with a network that samples tokens, and the argument with which it does
    "ErnieImagePipeline": ("pe", "use_pe"),
    "Flux2Pipeline": ("text_encoder", "caption_upsample_temperature"),
    "GlmImagePipeline": ("vision_language_encoder", "prompt"),
    "LongCatImagePipeline": ("text_encoder", "enable_prompt_rewrite"),
}
CHOOSES = "score_waveforms"
"""The method by which pipelines of audio sort several results for each prompt by how they fit it; it needs LIBRARY."""
LIBRARY = "librosa"
REFERRED = ("image", "video", "conditions")
CONTROLS = ("control_image", "control_mask")  # each is repeated for all results of its prompt, then comes the next one
REPEATS_EACH = ("IF", "Kandinsky3")  # pipelines that do so with all images
ENCODES_EACH = (  # pipelines that encode images, or videos, one after another with sampled noise
    "AnimateDiffVideoToVideo", "CogVideoXImageToVideo", "CogVideoXVideoToVideo", "ConsisID", "Cosmos2VideoToWorld",
    "Cosmos2_5_Transfer", "HunyuanSkyreelsImageToVideo", "LTXImageToVideo",
)  # fmt: skip
ENCODED_ONCE = {  # for all prompts, with noise that asks no generator
    "AceStepPipeline": ("reference_audio", "src_audio"),
    "AnimateDiffSparseControlNetPipeline": ("conditioning_frames",),
}
NEGATIVE_SIZES = ("negative_original_size", "negative_target_size")
OWN_NOISE = ("AmusedScheduler", "VQDiffusionScheduler")  # schedulers that sample noise for a whole batch themselves


def why_sampled(pipeline: str, networks: Container[str], call: Mapping[str, Any], defaults: Mapping[str, Any]) -> str:
    """Return why a call of such a pipeline may sample tokens for its prompts; empty if it does not.

    Whether a language model samples is part of its settings, so that ranks refuse it when it does.
    """
    network, argument = SAMPLERS.get(pipeline, ("", ""))
    is_used = network in networks and bool(call.get(argument, defaults.get(argument)))
    return f"{pipeline} samples tokens: those of a prompt depend on the prompts before it" if is_used else ""


def why_mixed(pipeline: str, methods: Container[str], call: Mapping[str, Any]) -> str:
    """Return why a call of such a pipeline mixes its prompts, by its arguments; empty if it does not."""
    for name, does in MIXED_BY.get(pipeline, {}).items():
        if call.get(name):
            return f"{pipeline} with {name}={call[name]} {does}"
    is_decoded = call.get("prompt") is not None and call.get("output_type") != "latent"
    if CHOOSES in methods and images_each(call) > 1 and is_decoded and find_spec(LIBRARY) is not None:
        return f"{pipeline} chooses the {images_each(call)} results of each prompt among those of all prompts"
    return ""
