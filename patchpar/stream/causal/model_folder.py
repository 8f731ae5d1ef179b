"""Streaming properties of a model folder, read without loading weights."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from patchpar.models.speech.parts import CONFIG as SPEECH_FILE
from patchpar.plan.json_files import read_object
from patchpar.stream.audio.conditioner import CONFIG as AUDIO_FILE
from patchpar.stream.config import StreamConfig
from patchpar.stream.hub import local_folder
from patchpar.stream.json_fields import whole
from patchpar.stream.model_index import HIGH_NOISE, LOW_NOISE

LOADED_BY_US = (HIGH_NOISE, LOW_NOISE, "scheduler")
"""Parts whose class in model_index.json is ignored, see `checkpoint`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamFolder:
    """`options`: of from_pretrained. `rate`: audio samples per second or None. `per_latent`: images a latent frame."""

    path: str
    options: Mapping[str, Any]
    config: StreamConfig
    rate: int | None
    per_latent: int

    @classmethod
    def read(
        cls, model: str | Path, *, config: StreamConfig | None = None, options: Mapping[str, Any] | None = None
    ) -> "StreamFolder":
        """Read a folder, an embedded model of the package, or a model of the hub, which is downloaded.

        `config`: replaces stream.json. Raises PlanError.
        """
        folder, options = local_folder(model, options or {}, besides=LOADED_BY_US)
        return cls(
            path=str(folder),
            options={name: value for name, value in options.items() if value is not None},
            config=config or StreamConfig.load(folder),
            rate=_fact(folder / HIGH_NOISE / AUDIO_FILE, "rate") or _fact(folder / HIGH_NOISE / SPEECH_FILE, "rate"),
            per_latent=_fact(folder / "vae" / "config.json", "scale_factor_temporal") or 1,
        )

    @property
    def frames(self) -> int:
        """Images of one block, in the steady state."""
        return self.config.blocks.frames * self.per_latent


def _fact(file: Path, name: str) -> int | None:
    return whole(f"{file}: {name}", read_object(file).get(name), 1, 2**20) if file.is_file() else None
