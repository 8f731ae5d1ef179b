"""`SpeechFeatures`: the hidden states of all layers of wav2vec2 (arXiv:2006.11477), one for each image.

    samples --wav2vec2--> 50 per second --linearly--> 30 per second --nearest--> one per image

The way over 30 per second is that of Wan-S2V (arXiv:2508.18621), whose weights were trained with it. wav2vec2 attends
to all samples that it is given, so that a stream gives it those of one block and some before it, none after.
"""

from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from patchpar.errors import PlanError, UnsupportedModel
from patchpar.plan.json_files import read_object

FOLDER = "audio_encoder"
"""Of a model's folder."""
BETWEEN = 30.0
"""Features per second, between those of wav2vec2 and those of images."""
UNUSED = "masked_spec_embed"
"""A weight of training."""
VARIANCE = 1e-7


class SpeechFeatures:
    """A wav2vec2 model. `normalises`: samples are given to it with mean 0 and variance 1."""

    def __init__(self, model: Any, *, rate: int = 16000, normalises: bool = True) -> None:
        self.model, self.normalises = model, normalises
        self._per_second = rate / float(model.config.inputs_to_logits_ratio)

    @classmethod
    def load(cls, folder: Path, *, rate: int, layers: int, features: int) -> "SpeechFeatures":
        """Load a wav2vec2 model from safetensors. Raises PlanError, and UnsupportedModel if it is not the one meant.

        `rate`: samples per second. `layers`, `features`: number and width of its hidden states.
        """
        from huggingface_hub.errors import StrictDataclassError
        from transformers import Wav2Vec2Model

        class HeadlessModel(Wav2Vec2Model):  # type: ignore[misc]  # transformers is not typed here
            """Published weights have a head for letters, of which every rank would report that it is not used."""

            _keys_to_ignore_on_load_unexpected: ClassVar = ["lm_head"]

        if not (folder / "config.json").is_file():
            raise PlanError(f"{folder} has no config.json: copy the folder of the wav2vec2 model there")
        try:
            model, info = HeadlessModel.from_pretrained(
                str(folder), use_safetensors=True, local_files_only=True, output_loading_info=True
            )
        except (OSError, ValueError, RuntimeError, TypeError, KeyError, AttributeError, StrictDataclassError) as error:
            raise PlanError(f"{folder} cannot be loaded as a wav2vec2 model: {error}") from error
        missing = sorted(set(info["missing_keys"]) - {UNUSED})
        if missing:
            raise UnsupportedModel(f"{folder} lacks weights of wav2vec2: {', '.join(missing[:3])}")
        found = model.config.num_hidden_layers + 1, model.config.hidden_size
        if found != (layers, features):
            raise UnsupportedModel(
                f"{folder}: {found[0]} hidden states of width {found[1]}, but this model was trained with {layers} of "
                f"width {features}: use the wav2vec2 model that was published with it"
            )
        file = folder / "preprocessor_config.json"
        facts = read_object(file) if file.is_file() else {}
        if facts.get("sampling_rate", rate) != rate:
            raise UnsupportedModel(
                f"{file}: this wav2vec2 model hears {facts['sampling_rate']!r:.40} samples per second, and the model "
                f"was trained with {rate}: use the wav2vec2 model that was published with it"
            )
        return cls(model.eval().requires_grad_(False), rate=rate, normalises=facts.get("do_normalize", True) is True)

    def to(self, device: torch.device) -> "SpeechFeatures":
        """Move the weights to a device; their dtype stays float32."""
        self.model.to(device)
        return self

    @torch.no_grad()
    def __call__(self, samples_N: Tensor, images: int, fps: float) -> Tensor:
        """Return the hidden states [layers, width, images] of mono samples [N] that last for `images` images."""
        samples = samples_N.to(self.model.device, torch.float32)
        if self.normalises:
            samples = (samples - samples.mean()) / torch.sqrt(samples.var(unbiased=False) + VARIANCE)
        states = self.model(samples[None], output_hidden_states=True).hidden_states
        return per_image(torch.cat(states).transpose(1, 2), self._per_second, images, fps)


def per_image(states_LWT: Tensor, per_second: float, images: int, fps: float) -> Tensor:
    """Return the features [L, W, images] of images from states [L, W, T], of which there are `per_second`.

    The last state stands for images that begin after it.
    """
    count = max(1, int(states_LWT.shape[-1] / per_second * BETWEEN))
    between = functional.interpolate(states_LWT, size=count, mode="linear", align_corners=True)
    at = torch.tensor([round(image / fps * BETWEEN) for image in range(images)], device=states_LWT.device)
    return between[..., at.clamp(max=count - 1)]
