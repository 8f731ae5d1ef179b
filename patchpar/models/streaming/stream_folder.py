"""Streaming properties of a model folder, read without loading weights."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from patchpar.errors import PlanError
from patchpar.models.speech.parts import CONFIG as SPEECH_FILE
from patchpar.models.streaming.causal.audio_conditioner import CONFIG as AUDIO_FILE
from patchpar.models.streaming.config import StreamConfig
from patchpar.models.streaming.video_folder import HIGH_NOISE, LOW_NOISE, local_folder
from patchpar.plan.json_fields import whole
from patchpar.plan.json_files import read_object
from patchpar.plan.scalars import is_whole

HEAVY = (HIGH_NOISE, LOW_NOISE, "vae", "text_encoder", "image_encoder", "audio_encoder")
"""Parts with weights."""
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
        cls,
        model: str | Path,
        *,
        config: StreamConfig | None = None,
        options: Mapping[str, Any] | None = None,
        has_weights: bool = True,
    ) -> "StreamFolder":
        """Read a folder, an embedded model of the package, or a model of the hub, which is downloaded.

        `config`: replaces stream.json. `has_weights`: or without them, which are not downloaded then. Raises PlanError.
        """
        folder, options = local_folder(model, options or {}, besides=LOADED_BY_US, unread=() if has_weights else HEAVY)
        return cls(
            path=str(folder),
            options={name: value for name, value in options.items() if value is not None},
            config=config or StreamConfig.load(folder),
            rate=_fact(folder / HIGH_NOISE / AUDIO_FILE, "rate") or _fact(folder / HIGH_NOISE / SPEECH_FILE, "rate"),
            per_latent=_fact(folder / "vae" / "config.json", "scale_factor_temporal") or 1,
        )

    @property
    def hears_speech(self) -> bool:
        """Whether the model takes pose videos and several voices, as Wan-S2V does."""
        return (Path(self.path) / HIGH_NOISE / SPEECH_FILE).is_file()

    @property
    def starts_from_image(self) -> bool:
        """Whether a stream needs a reference. Raises PlanError."""
        facts = self._transformer
        known = [facts.get(name) for name in ("in_channels", "out_channels")]
        return self.hears_speech or (is_whole(known[0]) and is_whole(known[1]) and known[0] > known[1])

    @property
    def frames(self) -> int:
        return self.config.blocks.frames * self.per_latent

    @property
    def heads(self) -> int:
        """Attention heads of the transformer, which ranks that share a step divide. Raises PlanError."""
        return whole("num_attention_heads of the transformer", self._transformer.get("num_attention_heads"), 1, 2**20)

    @property
    def _transformer(self) -> Mapping[str, Any]:
        return read_object(Path(self.path) / HIGH_NOISE / "config.json")

    def exchange_bytes(self, itemsize: int) -> int:
        """Return the bytes of queries, keys, values and outputs of all layers, of the tokens of a block.

        `itemsize`: bytes of a number. Of N ranks that share a step each sends (N - 1)/N² of it. Raises PlanError.
        """
        index = Path(self.path) / HIGH_NOISE / "config.json"
        facts, vae = read_object(index), read_object(Path(self.path) / "vae" / "config.json")
        patch = facts.get("patch_size")
        if not isinstance(patch, list) or len(patch) != 3:
            raise PlanError(f"{index}: patch_size={patch!r:.80}: it must be three numbers, of frames, rows and columns")
        known = [*zip(("frames", "rows", "columns"), patch, strict=True)]
        known += [(name, facts.get(name)) for name in ("num_layers", "num_attention_heads", "attention_head_dim")]
        frames, rows, columns, *sizes = (whole(f"{index}: {name}", value, 1, 2**20) for name, value in known)
        side = whole("scale_factor_spatial of the vae", vae.get("scale_factor_spatial"), 1, 2**10)
        config = self.config
        tokens = config.blocks.frames // frames * (config.height // side // rows) * (config.width // side // columns)
        return 4 * itemsize * tokens * math.prod(sizes)


def _fact(file: Path, name: str) -> int | None:
    return whole(f"{file}: {name}", read_object(file).get(name), 1, 2**20) if file.is_file() else None
