"""Sound and music."""

from __future__ import annotations

from typing import Any

import torch

from tests.tiny import audio_encoders
from tests.tiny import audio_pipelines as audio

from .entry import Built, Entry, builder, derived

_REFERENCE: dict[str, Any] = {"audio": audio.wave(), "guidance_scale": None}
_KEPT = _REFERENCE | {"mask_start_seconds": 1.0, "mask_end_seconds": 2.0}


def _music() -> Built:
    """Its own reading of a prompt fails with CLAP of transformers 5, so that the prompt is given already read."""
    embedding = torch.linspace(-1, 1, 32)[None]
    call = {"prompt": None, "prompt_embeds": embedding, "negative_prompt_embeds": -embedding}
    parts = {"feature_extractor": None, "text_encoder": audio_encoders.clap()}
    return derived(audio.audioldm, "MusicLDMPipeline", call, **parts)


ENTRIES = (
    Entry(name="StableAudioPipeline", build=audio.stable_audio),
    Entry(name="StableAudio3Pipeline", build=audio.stable_audio3),
    Entry(
        name="StableAudio3AudioToAudioPipeline",
        build=builder(audio.stable_audio3, "StableAudio3AudioToAudioPipeline", _REFERENCE | {"init_noise_level": 0.9}),
        guidance="none",
    ),
    Entry(
        name="StableAudio3InpaintPipeline",
        build=builder(audio.stable_audio3, "StableAudio3InpaintPipeline", _KEPT),
        guidance="none",
    ),
    Entry(name="AceStepPipeline", build=audio.ace_step),
    Entry(name="LongCatAudioDiTPipeline", build=audio.longcat, guidance="a call each"),
    Entry(name="AudioLDM2Pipeline", build=audio.audioldm2),
    Entry(name="AudioLDMPipeline", build=audio.audioldm, output_type="pt"),
    Entry(name="MusicLDMPipeline", build=_music, output_type="pt", prompts=""),
)
