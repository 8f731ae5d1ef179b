"""Streaming configuration of a model: `stream.json` in its folder, or an object with the same fields."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_args

from patchpar.errors import PlanError
from patchpar.models.streaming.families import FAMILIES
from patchpar.models.streaming.flow_schedule import FlowSchedule, Sampler
from patchpar.models.streaming.video_folder import CONFIG, HIGH_NOISE, SCHEDULER, is_self_forcing, low_noise_below
from patchpar.plan.json_fields import flag, number, text, whole
from patchpar.plan.json_files import read_object
from patchpar.plan.scalars import make_plain

LIMITS = {"height": 2**14, "width": 2**14, "text_tokens": 2**16}
MOST_STEPS, LONGEST_PROMPT = 1000, 2**16
LEAST_FPS, MOST_FPS = 1e-3, 1000.0
MOST_FRAMES = 2**16
PositionPolicy = Literal["abs", "relative"]
HistoryPolicy = Literal["noisy", "clean", "recompute"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CausalOptions:
    """Block size, attention window and sink of a stream. Raises PlanError.

    `frames`: latent frames per block. `window`: blocks that a block attends to, itself included. `sink_distance`:
    position of the sink in latent frames after the block's first one; negative for before. `positions`: the window
    stores rotated keys ("abs"), or keys are rotated at each read ("relative"), see `causal.attention_passes`. `sinks`:
    blocks of the window that are the stream's first ones for good, see `KVWindow` there. `history`: each step attends
    to earlier blocks at its own noise level ("noisy"), or all steps attend to finished blocks, whose keys and values
    are computed once ("clean") or anew for each block ("recompute"), see `stream.causal.clean_history`; as the model
    was trained.
    """

    frames: int = 3
    window: int = 4
    sink_distance: int = 8
    positions: PositionPolicy = "abs"
    history: HistoryPolicy = "noisy"
    sinks: int = 0

    def __post_init__(self) -> None:
        make_plain(self)
        for name in ("frames", "window"):
            whole(name, getattr(self, name), 1, MOST_FRAMES)
        whole("sink_distance", self.sink_distance, -MOST_FRAMES, MOST_FRAMES)
        if self.positions not in ("abs", "relative"):
            raise PlanError(f"positions={self.positions!r}: use 'abs' or 'relative'")
        if self.history not in get_args(HistoryPolicy):
            raise PlanError(f"history={self.history!r}: use {' or '.join(map(repr, get_args(HistoryPolicy)))}")
        whole("sinks", self.sinks, 0, self.window - 1)
        if self.sinks and self.history == "recompute":
            raise PlanError(f"sinks={self.sinks} with history='recompute', which keeps no keys and values: use sinks=0")

    @property
    def is_pipelined(self) -> bool:
        """Whether the denoising steps of a block can run on different ranks: each needs its own history only."""
        return self.history == "noisy"

    @property
    def extra_passes(self) -> int:
        """Passes of one block through the transformer beside its denoising steps."""
        return {"noisy": 0, "clean": 1, "recompute": self.window - 1}[self.history]


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamConfig:
    """How a model streams, as it was trained. Raises PlanError.

    `sigmas`: noise levels of the denoising steps, from 1 to 0. `fps`: frames per second. `height`, `width`: pixels.
    `blocks`: latent frames per block, window, sink. `text_tokens`: maximum tokens of a prompt. `adapt_sink`: the first
    finished frame becomes the sink. `prompts`: the training prompts, if there are few. `reference`: file name of the
    default reference image in the model's folder.
    """

    sigmas: tuple[float, ...]
    fps: float
    height: int
    width: int
    blocks: CausalOptions = field(default_factory=CausalOptions)
    text_tokens: int = 512
    sampler: Sampler = "euler"
    adapt_sink: bool = True
    prompts: tuple[str, ...] = ()
    reference: str | None = None

    def __post_init__(self) -> None:
        make_plain(self)
        whole("the number of sigmas", len(self.sigmas), 2, MOST_STEPS + 1)
        for sigma in self.sigmas:
            number("sigma", sigma, 0, 1)
        FlowSchedule(sigmas=self.sigmas, sampler=self.sampler)
        number("fps", self.fps, LEAST_FPS, MOST_FPS)
        for name, most in LIMITS.items():
            whole(name, getattr(self, name), 1, most)
        flag("adapt_sink", self.adapt_sink)
        for prompt in self.prompts:
            text("prompt", prompt, LONGEST_PROMPT)
        file = self.reference
        if file is not None and not (isinstance(file, str) and file not in ("", "..") and Path(file).name == file):
            raise PlanError(f"reference={file!r:.80}: it must be the name of a file in the model's folder")

    @property
    def schedule(self) -> FlowSchedule:
        return FlowSchedule(sigmas=self.sigmas, sampler=self.sampler)

    @property
    def steps(self) -> int:
        """Denoising steps of a block."""
        return len(self.sigmas) - 1

    @property
    def pipeline_steps(self) -> int:
        """Steps of a block that can run on different ranks: one, where all steps read finished blocks."""
        return self.steps if self.blocks.is_pipelined else 1

    @classmethod
    def load(cls, folder: Path) -> "StreamConfig":
        """Read `stream.json`, or derive it for a Self-Forcing model. Raises PlanError."""
        file = folder / CONFIG
        known = None if file.is_file() else _self_forcing_facts(folder)
        if known is not None:
            return cls.of(known)
        if not file.is_file():
            raise PlanError(
                f"{folder} has no {CONFIG}, which says how a block-causal model is streamed: `patchpar convert` makes "
                "a folder with one, and config=StreamConfig(...) replaces it. A model of short clips is for `patchpar "
                "fifo`, and one of images takes --input"
            )
        try:
            return cls.of(read_object(file))
        except PlanError as error:
            raise PlanError(f"{file}: {error}") from error
        except TypeError as error:
            raise PlanError(f"{file} is incomplete or cannot be read: {error}") from error

    @classmethod
    def of(cls, facts: Mapping[str, Any]) -> "StreamConfig":
        """Build from the fields of a JSON object. Raises PlanError; TypeError for missing fields or wrong types."""
        unknown = sorted(set(facts) - {known.name for known in fields(cls)})
        if unknown:
            raise PlanError(f"unknown fields {', '.join(unknown)}: use {_names(cls)}")
        blocks = facts.get("blocks", {})
        if not isinstance(blocks, Mapping):
            raise PlanError(f"blocks={blocks!r:.80}: it must be an object of {_names(CausalOptions)}")
        values: dict[str, Any] = {**facts, "blocks": CausalOptions(**blocks)}
        values.update({name: tuple(facts[name]) for name in ("sigmas", "prompts") if name in facts})
        return cls(**values)


def _names(kind: type[Any]) -> str:
    return ", ".join(known.name for known in fields(kind))


def _self_forcing_facts(folder: Path) -> dict[str, Any] | None:
    """Return the fields of stream.json for a model distilled by Self-Forcing (arXiv:2506.08009); None for others.

    The scheduler class identifies such a model. Four steps with the scheduler's shift, and new noise in each; blocks of
    3 latent frames in a window of 21, unless the transformer's configuration has other numbers; no sink. Blocks attend
    to finished ones. Raises PlanError.
    """
    if not is_self_forcing(folder):
        return None
    scheduler = read_object(folder / SCHEDULER)
    if low_noise_below(folder) is not None:
        raise PlanError(
            f"{folder} was distilled by Self-Forcing with two transformers, and its files do not state the denoising "
            "steps: pass config=StreamConfig(...)"
        )
    index = folder / HIGH_NOISE / "config.json"
    causal = read_object(index) if index.is_file() else {}
    frames = whole("num_frames_per_block", causal.get("num_frames_per_block", 3), 1, MOST_FRAMES)
    seen = whole("local_attn_size", causal.get("local_attn_size", -1), -1, MOST_FRAMES)
    window = whole("sliding_window_num_frames", causal.get("sliding_window_num_frames", 21), 1, MOST_FRAMES)
    seen = seen if seen > 0 else window
    shift = number("shift", scheduler.get("shift", 5.0), 0.01, 100)
    known = FAMILIES["self-forcing"].stream
    assert known is not None, "the family is block-causal"
    return {
        **known,
        "sigmas": FlowSchedule.shifted(4, shift=shift).sigmas,
        "blocks": {**known["blocks"], "frames": frames, "window": max(1, seen // frames)},
    }
