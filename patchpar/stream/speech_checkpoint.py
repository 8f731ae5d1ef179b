"""The parts of a Wan-S2V checkpoint beside its transformer, under the names of its own code."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from diffusers import WanTransformer3DModel
from torch import Tensor

from patchpar.errors import PlanError, UnsupportedModel
from patchpar.models.speech.config import AFTER, SpeechConfig
from patchpar.models.speech.parts import SpeechParts
from patchpar.plan.json_files import read_object
from patchpar.stream.causal.checkpoint import check_weights
from patchpar.stream.families import SPEECH
from patchpar.stream.weight_files import without_prefix

PARTS = ("casual_audio_encoder.", "audio_injector.", "frame_packer.", "cond_encoder.", "trainable_cond_mask.")
WAV2VEC2 = "wav2vec2-large-xlsr-53-english"
"""The folder beside the published weights."""
WANTED = ("config.json", "model.safetensors", "preprocessor_config.json")
FIRST = "casual_audio_encoder.encoder.conv1_local.conv.weight"
POSE = "cond_encoder.weight"
TRAINED: Mapping[str, Any] = {
    "enable_adain": True,
    "adain_mode": "attn_norm",
    "enable_framepack": True,
    "zero_timestep": True,
    "enable_motioner": False,
    "enable_tsm": False,
    "trainable_token_pos_emb": False,
}
"""Fields of a checkpoint's config.json with the only values that are understood, those of the published model."""


def split_speech(weights: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the weights of the transformer, and those of the other parts without prefix, of any shapes."""
    plain = {name: without_prefix(name) for name in weights}
    return (
        {name: x for name, x in weights.items() if not plain[name].startswith(PARTS)},
        {plain[name]: x for name, x in weights.items() if plain[name].startswith(PARTS)},
    )


def speech_parts(
    weights: Mapping[str, Tensor], transformer: WanTransformer3DModel, checkpoint: Path, fps: float
) -> SpeechParts:
    """Return the parts with these weights of any shapes, whose sizes are read from them.

    `checkpoint`: the folder that may have the published config.json. `fps`: images per second. Raises PlanError, and
    UnsupportedModel for weights that do not fit or are not there.
    """
    facts, net = _facts(checkpoint), transformer.config
    absent = sorted({SPEECH, FIRST, POSE} - weights.keys())
    if absent:
        raise UnsupportedModel(f"these weights are not those of Wan-S2V: missing: {', '.join(absent)}")
    for name in (FIRST, POSE):
        if weights[name].dim() < 2:
            raise UnsupportedModel(f"{name} has the shape {tuple(weights[name].shape)}, which is not that of Wan-S2V")
    after = facts.get("audio_inject_layers", list(AFTER))
    if not isinstance(after, list):
        raise UnsupportedModel(f"{checkpoint / 'config.json'}: audio_inject_layers={after!r:.40}: it must be a list")
    dim = net.num_attention_heads * net.attention_head_dim
    config = SpeechConfig(
        dim=dim,
        heads=net.num_attention_heads,
        after=tuple(after),
        layers=weights[SPEECH].numel(),
        features=weights[FIRST].shape[-2],
        tokens=max(1, len(weights[FIRST]) // (dim // 4)),
        channels=weights[POSE].shape[1],
        fps=fps,
    )
    with torch.device("meta"):
        parts = SpeechParts(config)
    check_weights(parts, weights, "the transformer's config.json")
    parts.load_state_dict(dict(weights), assign=True)
    return parts


def _facts(checkpoint: Path) -> Mapping[str, Any]:
    file = checkpoint / "config.json"
    facts = read_object(file) if file.is_file() else {}
    others = [name for name, value in TRAINED.items() if facts.get(name, value) != value]
    if others:
        raise UnsupportedModel(
            f"{file}: {', '.join(f'{name}={facts[name]!r:.40}' for name in others)}: only models with "
            f"{', '.join(f'{name}={TRAINED[name]!r}' for name in others)} are understood"
        )
    return facts


def wav2vec2_of(checkpoint: Path) -> Path:
    """Return the folder of the wav2vec2 model beside published weights. Raises PlanError if it is not there."""
    folder = checkpoint / WAV2VEC2
    lacks = [name for name in WANTED[:2] if not (folder / name).is_file()]
    if lacks:
        raise PlanError(
            f"{folder} has no {' and no '.join(lacks)}: put the folder of the wav2vec2 model there, which is published "
            "with Wan2.2-S2V-14B"
        )
    return folder


def copy_wav2vec2(folder: Path, target: Path) -> None:
    """Copy configuration and weights of a wav2vec2 model, and nothing else of its folder. Raises OSError."""
    target.mkdir()
    for name in WANTED:
        if (folder / name).is_file():
            shutil.copy2(folder / name, target / name)
