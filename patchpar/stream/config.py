"""Streaming configuration of a model: `stream.json` in its folder, or an object with the same fields."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from patchpar.errors import PlanError
from patchpar.plan.json_files import read_object
from patchpar.plan.scalars import make_plain
from patchpar.stream.causal_options import CausalOptions
from patchpar.stream.flow_schedule import FlowSchedule, Sampler
from patchpar.stream.json_fields import flag, number, text, whole
from patchpar.stream.model_index import self_forcing_facts

CONFIG = "stream.json"
LIMITS = {"height": 2**14, "width": 2**14, "text_tokens": 2**16}
MOST_STEPS, LONGEST_PROMPT = 1000, 2**16
LEAST_FPS, MOST_FPS = 1e-3, 1000.0


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
        if self.reference is not None and not _is_file_name(self.reference):
            raise PlanError(f"reference={self.reference!r:.80}: it must be the name of a file in the model's folder")

    @property
    def schedule(self) -> FlowSchedule:
        """The noise levels and the sampler."""
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
        known = None if file.is_file() else self_forcing_facts(folder)
        if known is not None:
            return cls.of(known)
        if not file.is_file():
            raise PlanError(f"{folder} has no {CONFIG}, which says how to stream it: pass config=StreamConfig(...)")
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


def _is_file_name(name: Any) -> bool:
    return isinstance(name, str) and name not in ("", ".", "..") and Path(name).name == name


def _names(kind: type[Any]) -> str:
    return ", ".join(known.name for known in fields(kind))
