"""Audio conditioning of a block-causal model: levels per image frame, and cross-attention to them after chosen blocks.

    samples --audio_levels--> one row of levels per image frame --latent_tokens--> n tokens per latent frame
            --AudioConditioner.encode--> width of the transformer --forward--> added to the tokens of that frame

Levels are loudness and the energy of a few bands, both in decibels: no other network is needed. A latent frame attends
to its own image frames and some before, none after.

Shapes: B batch, F latent frames, n audio tokens per latent frame, C levels per image frame, D width, L tokens.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional

from patchpar.comm.transport import TensorSpec
from patchpar.errors import PlanError
from patchpar.plan.json_fields import number, whole
from patchpar.plan.json_files import read_object
from patchpar.plan.scalars import make_plain

WEIGHTS, CONFIG = "audio.safetensors", "audio.json"
LIMITS = {"dim": 2**16, "heads": 2**16, "rate": 2**20, "bands": 2**12, "tokens": 2**12, "per_latent": 2**12}
SILENCE = -1.0
"""The level of silence: -100 dB of full scale. Full scale is 1."""
LOWEST_BAND = 100.0
"""Hz; speech has no energy below."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AudioConfig:
    """How audio reaches a transformer of width `dim`.

    `rate`: samples per second. `fps`: image frames per second. `bands`: frequency bands besides the loudness, evenly
    spaced in pitch. `tokens`: image frames that a latent frame attends to, its last one and those before. `per_latent`:
    image frames per latent frame; above 1 the first latent frame is one image frame, as in causal video autoencoders.
    `after`: indices of the transformer blocks that are followed by audio attention. Raises PlanError.
    """

    dim: int
    heads: int
    after: tuple[int, ...]
    fps: float
    rate: int = 16000
    bands: int = 8
    tokens: int = 4
    per_latent: int = 1

    def __post_init__(self) -> None:
        make_plain(self)
        for name, most in LIMITS.items():
            whole(name, getattr(self, name), name != "bands", most)
        for block in self.after:
            whole("after", block, 0, LIMITS["dim"])
        number("fps", self.fps, 0, LIMITS["rate"])
        if self.dim % self.heads:
            raise PlanError(f"dim={self.dim} is no multiple of heads={self.heads}: choose heads that divide it")
        if not 0 < self.fps <= self.rate / 2:
            raise PlanError(f"fps={self.fps:g} must be above 0 and at most half the rate of {self.rate} samples/s")

    @classmethod
    def of(cls, facts: Mapping[str, Any]) -> "AudioConfig":
        """Build from the fields of a JSON object. Raises PlanError; TypeError for missing or unknown fields."""
        return cls(**{**facts, "after": tuple(facts.get("after", ()))})

    @property
    def levels(self) -> int:
        """Levels per image frame: the loudness and the bands."""
        return 1 + self.bands

    @property
    def before(self) -> int:
        """Image frames before a block whose samples it needs."""
        return self.tokens - 1

    def shape(self, frames: int) -> tuple[int, ...]:
        """Return the shape of the inputs of a block of `frames` latent frames."""
        return 1, frames, self.tokens, self.levels

    def inputs(self, samples_N: Tensor, images: range, latents: range) -> Tensor:
        """Return the audio tokens [1, F, n, C] of F latent frames, from samples [N] of `images`. Raises PlanError."""
        levels = audio_levels(samples_N, self)[: len(images)]
        return latent_tokens(levels, latents, self, first=images.start)[None]


def audio_levels(samples_N: Tensor, config: AudioConfig) -> Tensor:
    """Return levels [P, 1 + bands], about -1 to 1, of mono samples [N] between -1 and 1 at `config.rate`.

    Image frame i depends on samples i * rate / fps to (i + 1) * rate / fps and no other. An incomplete last frame is
    left out.
    """
    period = config.rate / config.fps
    width = round(period)
    count = int((len(samples_N) + 0.5) // period)
    if not count:
        return samples_N.new_zeros(0, config.levels)
    starts = torch.tensor([round(i * period) for i in range(count)], dtype=torch.long)
    padded = functional.pad(samples_N.float(), (0, width))
    frames = padded[starts[:, None] + torch.arange(width)]
    loudness = frames.square().mean(1, keepdim=True)
    spectrum = torch.fft.rfft(frames * torch.hann_window(width, periodic=True)).abs().square()
    spectrum = spectrum * (8 / 3 * 2 / width**2)  # the bands then sum to the mean square of the samples
    power = torch.cat([loudness, spectrum @ _bands(width, config)], 1)
    return (10 * torch.log10(power.clamp_min(1e-10)) + 50) / 50  # -1 at -100 dB and below, 1 at full scale


def _bands(width: int, config: AudioConfig) -> Tensor:
    """Return which spectrum bins belong to which band, [bins, bands] of zeros and ones."""
    frequencies = torch.arange(width // 2 + 1) * (config.rate / width)
    ratio = math.log(config.rate / 2 / LOWEST_BAND)
    band = (frequencies.clamp_min(1.0) / LOWEST_BAND).log() / ratio * config.bands
    band = band.floor().clamp(max=config.bands - 1)
    return (band[:, None] == torch.arange(config.bands)).float()


def latent_tokens(levels_PC: Tensor, latents: range, config: AudioConfig, *, first: int = 0) -> Tensor:
    """Return the audio tokens [F, n, C] of the latent frames `latents`, from levels [P, C] of image frames `first` on.

    Before image frame 0 there is silence. Raises PlanError if the levels of a frame are missing.
    """
    last = torch.tensor(latents) * config.per_latent  # the last image frame that each represents
    frames = last[:, None] + torch.arange(1 - config.tokens, 1)
    missing = (frames >= first + len(levels_PC)) | ((frames >= 0) & (frames < first))
    if missing.any():
        raise PlanError(
            f"latent frames {latents.start} to {latents.stop - 1} need audio of image frames up to {int(last[-1])}, "
            f"but there is audio for frames {first} to {first + len(levels_PC) - 1} only"
        )
    silence = levels_PC.new_full((1, levels_PC.shape[1]), SILENCE)
    rows = torch.where(frames < 0, 0, frames - first + 1)
    return torch.cat([silence, levels_PC])[rows]


class AudioAttention(nn.Module):
    """Cross-attention from a frame's tokens to its audio tokens. Its output is 0 until it has been trained."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(dim)
        self.to_q, self.to_k, self.to_v, self.to_out = (nn.Linear(dim, dim) for _ in range(4))
        nn.init.zeros_(self.to_out.weight)
        nn.init.zeros_(self.to_out.bias)

    def forward(self, hidden_BLD: Tensor, audio_BFnD: Tensor) -> Tensor:
        """Return what is to be added to the tokens [B, L, D] of F frames with L / F tokens each, [B, L, D]."""
        batch, length, dim = hidden_BLD.shape
        frames = audio_BFnD.shape[1]
        rows = self.norm(hidden_BLD).reshape(batch * frames, length // frames, dim)
        tokens = audio_BFnD.flatten(0, 1)
        q, k, v = (
            x.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for x in (self.to_q(rows), self.to_k(tokens), self.to_v(tokens))
        )
        out = functional.scaled_dot_product_attention(q, k, v)
        return self.to_out(out.transpose(1, 2).flatten(2)).reshape(batch, length, dim)


class AudioConditioner(nn.Module):
    """Audio embedding and attention layers of a transformer, saved as `audio.safetensors` and `audio.json`."""

    def __init__(self, config: AudioConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Sequential(nn.Linear(config.levels, config.dim), nn.SiLU(), nn.Linear(config.dim, config.dim))
        self.place = nn.Parameter(torch.zeros(config.tokens, config.dim))
        self.layers = nn.ModuleDict({str(i): AudioAttention(config.dim, config.heads) for i in config.after})

    def token_spec(self, frames: int) -> TensorSpec:
        """Return shape and dtype of the audio tokens of a block of `frames` latent frames."""
        return TensorSpec(self.config.shape(frames), torch.float32)

    def heard(self, tokens_BFnC: Tensor) -> Tensor:
        """Return the audio tokens of AudioConfig.inputs as they are, [B, F, n, C]."""
        return tokens_BFnC

    def encode(self, tokens_BFnC: Tensor) -> Tensor:
        """Embed audio tokens [B, F, n, C] in the width of the transformer, [B, F, n, D]."""
        return self.embed(tokens_BFnC.to(self.place.dtype)) + self.place

    def forward(self, layer: int, hidden_BLD: Tensor, audio_BFnD: Tensor) -> Tensor:
        """Return what is to be added to the tokens after block `layer`, [B, L, D]."""
        return self.layers[str(layer)](hidden_BLD, audio_BFnD)

    def save(self, folder: Path) -> None:
        """Write weights and configuration into `folder`."""
        save_file({name: x.contiguous() for name, x in self.state_dict().items()}, folder / WEIGHTS)
        (folder / CONFIG).write_text(json.dumps(asdict(self.config), indent=2) + "\n")

    @classmethod
    def load(cls, folder: Path) -> "AudioConditioner":
        """Read what `save` wrote, from safetensors only. Raises PlanError if it is missing or inconsistent."""
        if not (folder / CONFIG).exists():
            raise PlanError(f"{folder} has no {CONFIG}: this model takes no audio")
        try:
            conditioner = cls(AudioConfig.of(read_object(folder / CONFIG)))
            conditioner.load_state_dict(load_file(folder / WEIGHTS))
        except (OSError, RuntimeError, SafetensorError, TypeError) as error:
            raise PlanError(f"{folder / CONFIG} and {WEIGHTS} are not those of one model: {error}") from error
        return conditioner.eval().requires_grad_(False)
