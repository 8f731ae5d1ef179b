"""Released block-causal models of the Wan architecture: how their checkpoints are named, and how they are streamed."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from patchpar.errors import PlanError
from patchpar.stream.flow_schedule import FlowSchedule


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamFamily:
    """What is known of the checkpoints of one paper.

    `weights`: names under which they may have the transformer, best first. `base`: the model of the other components,
    on the hub. `stream`: fields of stream.json; None for models of short clips, which FifoStreamingPipeline takes.
    `source`: the paper.
    """

    weights: tuple[str, ...]
    base: str
    stream: Mapping[str, Any] | None
    source: str


WAN_1_3B, WAN_14B = "Wan-AI/Wan2.1-T2V-1.3B-Diffusers", "Wan-AI/Wan2.1-T2V-14B-Diffusers"
DISTILLED = {"fps": 16, "height": 480, "width": 832, "sampler": "renoise", "adapt_sink": False}
FOUR_STEPS = FlowSchedule.shifted(4, shift=5.0).sigmas
FAMILIES: Mapping[str, StreamFamily] = {
    "self-forcing": StreamFamily(
        weights=("generator_ema", "generator"),
        base=WAN_1_3B,
        stream={**DISTILLED, "sigmas": FOUR_STEPS, "blocks": {"frames": 3, "window": 7, "history": "clean"}},
        source="Self-Forcing, arXiv:2506.08009",
    ),
    "causvid": StreamFamily(
        weights=("generator",),
        base=WAN_1_3B,
        stream={
            **DISTILLED,
            "sigmas": (1.0, 0.757, 0.522, 0.0),
            "blocks": {"frames": 3, "window": 7, "history": "clean"},
        },
        source="CausVid, arXiv:2412.07772",
    ),
    "krea": StreamFamily(
        weights=(),
        base=WAN_14B,
        stream={**DISTILLED, "sigmas": FOUR_STEPS, "blocks": {"frames": 3, "window": 2, "history": "recompute"}},
        source="Krea Realtime 14B, github.com/krea-ai/realtime-video",
    ),
    "longlive": StreamFamily(
        weights=("generator", "model"),
        base=WAN_1_3B,
        stream={
            **DISTILLED,
            "sigmas": FOUR_STEPS,
            "blocks": {"frames": 3, "window": 4, "sinks": 1, "positions": "relative", "history": "clean"},
        },
        source="LongLive, arXiv:2509.22622; its LoRA is merged with --lora",
    ),
    "streamdiffusionv2": StreamFamily(
        weights=("generator",),
        base=WAN_1_3B,
        stream={
            **DISTILLED,
            "sigmas": (0.7, 0.5, 0.0),
            "blocks": {"frames": 1, "window": 6, "sinks": 3, "positions": "relative", "history": "noisy"},
        },
        source="StreamDiffusionV2, arXiv:2511.07399",
    ),
    "wan": StreamFamily(weights=(), base=WAN_1_3B, stream=None, source="Wan, arXiv:2503.20314"),
}


def family_of(name: str | None, names: frozenset[str]) -> tuple[str, StreamFamily]:
    """Return a family and its name. `name`: what the user says. `names`: of a checkpoint's entries. Raises PlanError.

    Only Self-Forcing writes averaged weights beside the others; other checkpoints do not say what they are.
    """
    found = name or ("self-forcing" if "generator_ema" in names else None)
    if found is None:
        raise PlanError(f"the checkpoint does not say how it is streamed: pass --family, one of {', '.join(FAMILIES)}")
    if found not in FAMILIES:
        raise PlanError(f"family {found!r} is not known: use one of {', '.join(FAMILIES)}")
    return found, FAMILIES[found]
