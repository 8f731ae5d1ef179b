"""A block-causal model of a few thousand weights, with everything a real one has: text, sound, sink, causal decoder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKLWan, FlowMatchEulerDiscreteScheduler, WanPipeline, WanTransformer3DModel
from torch import Tensor

from patchpar.models.streaming.causal.attention_passes import KVWindow
from patchpar.models.streaming.causal.audio_conditioner import AudioConditioner, AudioConfig
from patchpar.models.streaming.causal.step_sharding import StepGroup
from patchpar.models.streaming.config import CausalOptions
from patchpar.models.streaming.decoder import WanDecoder
from patchpar.models.streaming.flow_schedule import FlowSchedule
from patchpar.stream.causal.wan import WanStream
from patchpar.stream.events import StepConditions
from patchpar.stream.messages import StreamRun
from tests.tensors import noise
from tests.tiny import encoders, tokenizers
from training.banded import BandedWan

FRAMES, ROWS, COLUMNS, TEXT = 2, 4, 6, 5
AUDIO = AudioConfig(dim=24, heads=2, after=(0,), fps=20, rate=2000, bands=3, tokens=3, per_latent=2)


def transformer(dtype: torch.dtype = torch.float32, text_dim: int = 8, heads: int = 2) -> WanTransformer3DModel:
    torch.manual_seed(0)
    net = WanTransformer3DModel(
        num_attention_heads=heads,
        attention_head_dim=24 // heads,
        in_channels=16,
        out_channels=16,
        text_dim=text_dim,
        freq_dim=16,
        ffn_dim=32,
        num_layers=2,
        cross_attn_norm=True,
        rope_max_seq_len=64,
    )
    net = net if dtype is torch.float32 else net.to(dtype)
    return net.eval().requires_grad_(False)


def conditioner(dtype: torch.dtype = torch.float32) -> AudioConditioner:
    """With an effect: a new one changes nothing."""
    torch.manual_seed(1)
    audio = AudioConditioner(AUDIO)
    for layer in audio.layers.values():
        torch.nn.init.normal_(layer.to_out.weight, std=0.3)
    return audio.to(dtype).eval().requires_grad_(False)


def vae() -> AutoencoderKLWan:
    torch.manual_seed(2)
    net = AutoencoderKLWan(
        base_dim=3,
        z_dim=16,
        dim_mult=[1, 1],
        num_res_blocks=0,
        temperal_downsample=[True],
        scale_factor_temporal=2,
        scale_factor_spatial=2,
    )
    return net.eval().requires_grad_(False)


def text(number: int) -> Tensor:
    return noise(1, TEXT, 8, seed=100 + number)


def sink(number: int) -> Tensor:
    return noise(1, 16, 1, ROWS, COLUMNS, seed=200 + number)


def speech(block: int, batch: int = 1) -> Tensor:
    return noise(batch, FRAMES, AUDIO.tokens, AUDIO.levels, seed=300 + block)


def causal(
    *,
    dtype: torch.dtype = torch.float32,
    hears: bool = True,
    heads: int = 2,
    inner: StepGroup | None = None,
    **options: Any,
) -> BandedWan:
    chosen = CausalOptions(**{"frames": FRAMES, "window": 3, "sink_distance": 5} | options)
    return BandedWan(transformer(dtype, heads=heads), chosen, conditioner(dtype) if hears else None, inner)


def num_bytes(memory: KVWindow) -> int:
    """Of all that it has allocated."""
    return sum(x.numel() * x.element_size() for x in (memory._keys, memory._values, memory._sink_keys))


def run_of(**other: Any) -> StreamRun:
    size = {"rows": ROWS, "columns": COLUMNS}
    return StreamRun(**{"ranks": 1, "seed": 7, "first_block": 0, "adapt_sink": True, **size, **other})


def begun_with(text_BTD: Tensor, *, has_sink: bool = False) -> StepConditions:
    return StepConditions(text=text_BTD, sink=sink(0) if has_sink else None)


def stream(
    steps: int,
    *,
    dtype: torch.dtype = torch.float32,
    sampler: Any = "euler",
    adapt_sink: bool = True,
    has_sink: bool = True,
    speakers: int = 1,
    **options: Any,
) -> WanStream:
    run, first = run_of(adapt_sink=adapt_sink, speakers=speakers), begun_with(text(0), has_sink=has_sink)
    schedule = FlowSchedule.shifted(steps, sampler=sampler)
    return WanStream(causal(dtype=dtype, **options), schedule, WanDecoder(vae()), run, first)


STREAM = {
    "blocks": {"frames": FRAMES, "window": 3, "sink_distance": 5},
    "sigmas": [1.0, 0.6, 0.0],
    "fps": 20,
    "height": 2 * ROWS,
    "width": 2 * COLUMNS,
    "text_tokens": TEXT,
}


def write_folder(folder: Path, *, hears: bool = True) -> Path:
    """A model as it is kept: a WanPipeline with stream.json, and ears beside the transformer."""
    encoder = encoders.umt5()
    pipe = WanPipeline(
        tokenizer=tokenizers.t5(),
        text_encoder=encoder,
        vae=vae(),
        scheduler=FlowMatchEulerDiscreteScheduler(),
        transformer=transformer(text_dim=encoder.config.d_model),
    )
    pipe.save_pretrained(folder)
    if hears:
        conditioner().save(folder / "transformer")
    (folder / "stream.json").write_text(json.dumps(STREAM))
    return folder
