"""What the files of a WanPipeline folder say of it, read without loading anything."""

from pathlib import Path
from typing import Any

from patchpar.errors import PlanError
from patchpar.plan.json_files import read_object
from patchpar.stream.causal_options import MOST_FRAMES
from patchpar.stream.flow_schedule import FlowSchedule
from patchpar.stream.json_fields import number, whole

SELF_FORCING = "SelfForcingFlowMatchScheduler"
"""The scheduler that FastVideo writes into such folders, as in wlsaidhi/SFWan2.1-T2V-1.3B-Diffusers."""
HIGH_NOISE, LOW_NOISE = "transformer", "transformer_2"
"""The parts of a pipeline that denoise. Wan 2.2 has one for each range of noise levels, all others have the first."""


def read_index(folder: Path) -> dict[str, Any]:
    """What model_index.json says. Raises PlanError."""
    file = folder / "model_index.json"
    if not file.is_file():
        raise PlanError(f"{folder} has no model_index.json: give the folder of a WanPipeline")
    return read_object(file)


def low_noise_below(folder: Path) -> float | None:
    """The noise level, 0 to 1, below which a pipeline has another transformer; None if it has one only.

    Raises PlanError.
    """
    index = read_index(folder)
    part = index.get(LOW_NOISE)
    if not isinstance(part, list) or not part or part[-1] is None:
        return None
    boundary = index.get("boundary_ratio")
    if boundary is None:
        raise PlanError(f"{folder / 'model_index.json'} has two transformers, but no boundary_ratio between them")
    return number("boundary_ratio", boundary, 0, 1)


def self_forcing_facts(folder: Path) -> dict[str, Any] | None:
    """How a model distilled by Self-Forcing (arXiv:2506.08009) streams, as stream.json would say; None for others.

    It is told by its scheduler. Four steps, warped by the scheduler's shift, with new noise in each; blocks of 3 latent
    frames in a window of 21; no sink. Other numbers in the transformer's configuration are followed. Raises PlanError.
    """
    scheduler = _read(folder / "scheduler" / "scheduler_config.json")
    if scheduler.get("_class_name") != SELF_FORCING:
        return None
    if low_noise_below(folder) is not None:
        raise PlanError(
            f"{folder} was distilled by Self-Forcing for two transformers, and its steps are nowhere in it: pass "
            "config=StreamConfig(...)"
        )
    causal = _read(folder / HIGH_NOISE / "config.json")
    frames = whole("num_frames_per_block", causal.get("num_frames_per_block", 3), 1, MOST_FRAMES)
    seen = whole("local_attn_size", causal.get("local_attn_size", -1), -1, MOST_FRAMES)
    window = whole("sliding_window_num_frames", causal.get("sliding_window_num_frames", 21), 1, MOST_FRAMES)
    seen = seen if seen > 0 else window
    shift = number("shift", scheduler.get("shift", 5.0), 0.01, 100)
    return {
        "sigmas": FlowSchedule.shifted(4, shift=shift).sigmas,
        "sampler": "renoise",
        "fps": 16,
        "height": 480,
        "width": 832,
        "blocks": {"frames": frames, "window": max(1, seen // frames)},
        "adapt_sink": False,
    }


def _read(file: Path) -> dict[str, Any]:
    """A configuration; nothing where there is none. Raises PlanError."""
    return read_object(file) if file.is_file() else {}
