"""Models that go on from an image are given what diffusers gives them, block by block."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, WanImageToVideoPipeline, WanPipeline, WanTransformer3DModel
from torch import Tensor

from patchpar.errors import PlanError
from patchpar.models.streaming.causal.causal_wan import CausalWan
from patchpar.models.streaming.config import CausalOptions
from patchpar.models.streaming.decoder import WanDecoder
from patchpar.models.streaming.flow_schedule import FlowSchedule
from patchpar.plan.stream_plan import StreamPlan
from patchpar.stream.causal.pipeline import StreamingPipeline
from patchpar.stream.causal.wan import WanStream
from patchpar.stream.events import Change, Prompt, Reference
from tests.stream.running import Script, differing, pipelined, serial
from tests.stream.tiny import COLUMNS, FRAMES, ROWS, STREAM, begun_with, run_of, text, vae
from tests.tensors import noise
from tests.tiny import encoders, tokenizers

MASKS, CHUNKS = 2, 2  # one mask for each image of a latent frame of this VAE; a video of 1 + 8 images, 5 latents
IMAGE = noise(1, 3, 2 * ROWS, 2 * COLUMNS, seed=8).clamp(-1, 1)


def transformer(text_dim: int = 8) -> WanTransformer3DModel:
    torch.manual_seed(0)
    net = WanTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=32 + MASKS,
        out_channels=16,
        text_dim=text_dim,
        freq_dim=16,
        ffn_dim=32,
        num_layers=2,
        cross_attn_norm=True,
        rope_max_seq_len=64,
    )
    return net.eval().requires_grad_(False)


def stream(steps: int = 2) -> WanStream:
    causal = CausalWan(transformer(), CausalOptions(frames=FRAMES, window=3, sink_distance=5))
    return WanStream(causal, FlowSchedule.shifted(steps), WanDecoder(vae()), run_of(), begun_with(text(0)))


def reference(image: Tensor = IMAGE) -> Reference:
    decoder = WanDecoder(vae())
    return Reference(latents=decoder.encode(image), video=decoder.encode(image, chunks=CHUNKS))


def test_the_condition_is_that_of_diffusers() -> None:
    """Masks and latents of a whole video, put together from blocks; behind the video its last frame goes on."""
    pipe = WanImageToVideoPipeline(
        tokenizer=None,
        text_encoder=None,
        vae=vae(),
        scheduler=FlowMatchEulerDiscreteScheduler(),
        image_processor=None,
        image_encoder=None,
        transformer=None,
    )
    size, latents = (2 * ROWS, 2 * COLUMNS), noise(1, 16, 5, ROWS, COLUMNS)
    _, wanted = pipe.prepare_latents(IMAGE, 1, 16, *size, 9, torch.float32, torch.device("cpu"), latents=latents)
    model = stream()
    state = model.new_state(0)
    model.apply(state, reference())
    given = torch.cat(
        [model._with_condition(state.now, torch.zeros(1, 16, 2, ROWS, COLUMNS), first)[:, 16:] for first in (0, 2, 4)],
        2,
    )
    assert wanted.shape == (1, MASKS + 16, 5, ROWS, COLUMNS)
    assert torch.equal(given[:, :, :5], wanted)
    assert torch.equal(given[:, :, 5], wanted[:, :, 4])
    assert given[:, :MASKS, 0].eq(1).all()
    assert given[:, :MASKS, 1:].eq(0).all()


def test_steps_on_ranks_are_one_process() -> None:
    changes: dict[int, tuple[Change, ...]] = {0: (reference(),), 3: (Prompt(text=text(1), transition="recache"),)}
    outcome, _ = pipelined(stream, StreamPlan.even(2, 3), Script(changes, hears=False))
    assert differing(outcome, serial(stream(), changes, hears=False)) == []
    other = {**changes, 0: (reference(-IMAGE),)}
    assert differing(outcome, serial(stream(), other, hears=False)) == list(range(6))


def test_its_image_stays_its_sink() -> None:
    assert not stream().adapts_sink


def test_without_an_image_it_is_refused() -> None:
    with pytest.raises(PlanError, match="begin the stream with reference="):
        serial(stream(), {}, hears=False)
    model, only_sink = stream(), Reference(latents=reference().latents)
    state = model.new_state(0)
    with pytest.raises(PlanError, match="begin the stream with reference="):
        model.apply(state, only_sink)


def test_a_pipeline_goes_on_from_its_image(tmp_path: Path) -> None:
    encoder = encoders.umt5()
    WanPipeline(
        tokenizer=tokenizers.t5(),
        text_encoder=encoder,
        vae=vae(),
        scheduler=FlowMatchEulerDiscreteScheduler(),
        transformer=transformer(encoder.config.d_model),
    ).save_pretrained(tmp_path)
    (tmp_path / "stream.json").write_text(json.dumps(STREAM))
    one, other = ((noise(2 * ROWS, 2 * COLUMNS, 3, seed=n) * 60 + 128).clamp(0, 255).to(torch.uint8) for n in (1, 2))
    with StreamingPipeline.from_pretrained(tmp_path, devices="cpu") as pipe:
        with pytest.raises(PlanError, match="pass reference="):
            pipe.stream("a fox")
        made = []
        for image in (one, one, other):
            with pipe.stream("a fox", reference=image, seconds=0.5) as session:
                made.append(torch.cat([chunk.frames for chunk in session]))
    assert torch.equal(made[0], made[1])
    assert not torch.equal(made[0], made[2])
