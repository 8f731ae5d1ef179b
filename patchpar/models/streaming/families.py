"""Released block-causal models of the Wan architecture: how their checkpoints are named, and how they are streamed."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from patchpar.errors import PlanError
from patchpar.models.streaming.flow_schedule import FlowSchedule


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamFamily:
    """What is known of the checkpoints of one paper.

    `weights`: names under which they may have the transformer, best first; empty where they have nothing else. `base`:
    the model of the other components, on the hub. `stream`: fields of stream.json; None for models of short clips,
    which FifoStreamingPipeline takes. `hears_speech`: they have the parts of Wan-S2V, and wav2vec2
    beside them. `lora_alpha`: of their LoRA, whose file does not have it.
    """

    base: str
    stream: Mapping[str, Any] | None
    weights: tuple[str, ...] = ()
    hears_speech: bool = False
    lora_alpha: float | None = None


WAN_1_3B, WAN_14B = "Wan-AI/Wan2.1-T2V-1.3B-Diffusers", "Wan-AI/Wan2.1-T2V-14B-Diffusers"
DISTILLED = {"fps": 16, "height": 480, "width": 832, "sampler": "renoise", "adapt_sink": False}
CLEAN_WINDOW = {"frames": 3, "window": 7, "history": "clean"}
SPEECH = "casual_audio_encoder.weights"
"""A name that only checkpoints of Wan-S2V have."""
FOUR_STEPS = FlowSchedule.shifted(4, shift=5.0).sigmas
TWICE_SHIFTED = (1.0, 0.8576930, 0.6021507, 0.0089283, 0.0)
"""Four even noise levels with shift 3 twice, once by diffusers' scheduler when it is made: as Live Avatar runs it."""
FAMILIES: Mapping[str, StreamFamily] = {
    "self-forcing": StreamFamily(  # Self-Forcing, arXiv:2506.08009
        weights=("generator_ema", "generator"),
        base=WAN_1_3B,
        stream={**DISTILLED, "sigmas": FOUR_STEPS, "blocks": CLEAN_WINDOW},
    ),
    "causvid": StreamFamily(  # CausVid, arXiv:2412.07772
        weights=("generator",),
        base=WAN_1_3B,
        stream={**DISTILLED, "sigmas": (1.0, 0.757, 0.522, 0.0), "blocks": CLEAN_WINDOW},
    ),
    "krea": StreamFamily(  # Krea Realtime 14B, github.com/krea-ai/realtime-video
        base=WAN_14B,
        stream={**DISTILLED, "sigmas": FOUR_STEPS, "blocks": {"frames": 3, "window": 2, "history": "recompute"}},
    ),
    "longlive": StreamFamily(  # LongLive, arXiv:2509.22622; its LoRA is merged with --lora
        weights=("generator", "model"),
        base=WAN_1_3B,
        stream={
            **DISTILLED,
            "sigmas": FOUR_STEPS,
            "blocks": {"frames": 3, "window": 4, "sinks": 1, "positions": "relative", "history": "clean"},
        },
    ),
    "streamdiffusionv2": StreamFamily(  # StreamDiffusionV2, arXiv:2511.07399
        weights=("generator",),
        base=WAN_1_3B,
        stream={
            **DISTILLED,
            "sigmas": (0.7, 0.5, 0.0),
            "blocks": {"frames": 1, "window": 6, "sinks": 3, "positions": "relative", "history": "noisy"},
        },
    ),
    "live-avatar": StreamFamily(  # arXiv:2512.04677: the LoRA that makes Wan-S2V (arXiv:2508.18621) block-causal
        base=WAN_14B,
        stream={
            "fps": 25,
            "height": 400,
            "width": 720,
            "sigmas": TWICE_SHIFTED,
            "blocks": {"frames": 3, "window": 4, "sink_distance": 8},
        },
        hears_speech=True,
        lora_alpha=64,
    ),
    "wan": StreamFamily(base=WAN_1_3B, stream=None),  # Wan, arXiv:2503.20314
}


def family_of(name: str | None, names: frozenset[str], *, has_lora: bool = False) -> tuple[str, StreamFamily]:
    """Return a family and its name. `name`: what the user says. `names`: of a checkpoint's entries. Raises PlanError.

    Only Self-Forcing writes averaged weights beside the others, and only Wan-S2V encodes audio, which Live Avatar's
    LoRA makes block-causal (`has_lora`); other checkpoints do not say what they are.
    """
    found = name or ("self-forcing" if "generator_ema" in names else None)
    if name in (None, "wan-s2v") and (name or any(each.endswith(SPEECH) for each in names)):
        if not has_lora:
            raise PlanError(
                "Wan-S2V is not block-causal: pass the LoRA that makes it so, --lora liveavatar.safetensors; or "
                "--family live-avatar if the checkpoint has it already"
            )
        found = "live-avatar"
    if found is None:
        raise PlanError(f"the checkpoint does not say how it is streamed: pass --family, one of {', '.join(FAMILIES)}")
    if found not in FAMILIES:
        raise PlanError(f"family {found!r} is not known: use one of {', '.join(FAMILIES)}")
    return found, FAMILIES[found]
