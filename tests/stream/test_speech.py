"""Live Avatar, as it is published: converted, streamed on ranks, equal to a forward of its own."""

from __future__ import annotations

import json
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from safetensors.torch import load_file, save_file
from torch import Tensor

from patchpar.comm.transport import Transport
from patchpar.errors import PlanError, UnsupportedModel
from patchpar.models.speech.features import FOLDER, SpeechFeatures
from patchpar.models.speech.frame_packer import NUM_FRAMES
from patchpar.models.speech.parts import SpeechParts
from patchpar.models.streaming.causal.causal_wan import BlockInputs
from patchpar.models.streaming.causal.speech_wan import REFERENCE_TIME
from patchpar.models.streaming.causal.step_sharding import StepGroup
from patchpar.models.streaming.checkpoint import RequiredWeights, load_wan
from patchpar.models.streaming.config import CausalOptions, StreamConfig
from patchpar.models.streaming.convert import WAV2VEC2, ConvertedModel, convert_checkpoint
from patchpar.models.streaming.decoder import WanDecoder
from patchpar.models.streaming.families import TWICE_SHIFTED
from patchpar.models.streaming.flow_schedule import keyed_noise
from patchpar.models.streaming.lora import LORA
from patchpar.models.streaming.video_folder import HIGH_NOISE
from patchpar.plan.stream_plan import StreamPlan
from patchpar.stream.causal.runner import network_of
from patchpar.stream.causal.wan import WanStream
from patchpar.stream.events import Change, Parameter, Prompt, Reference
from patchpar.stream.stage_link import Payload
from tests.stream.reference_speech import ReferenceSpeech
from tests.stream.reference_wan import KV, Seen
from tests.stream.running import Outcome, Script, differing, pipelined, serial, stage
from tests.stream.test_clean_history import furthest
from tests.stream.test_convert import Weights
from tests.stream.test_inner import latents_apart, part
from tests.stream.tiny import begun_with, run_of
from tests.stream.tiny_speech import (
    AFTER,
    COLUMNS,
    HEADS,
    LAYERS,
    LORA_LAYERS,
    ROWS,
    lora,
    merged,
    published,
    samples,
    write_base,
    write_checkpoint,
)
from tests.tensors import noise, relative
from tests.unit.threads import on_threads

SEED, BLOCKS, TEXT = 7, 4, 5
SHORT = {"sigmas": (1.0, 0.6, 0.0), "window": 2}
"""Fewer steps and a shorter window than those published, so that few blocks show all: the same loop."""
EPSILON = 1e-6
SPEECH_PARTS = ("casual_audio_encoder.", "audio_injector.", "frame_packer.", "cond_encoder.", "trainable_cond_mask.")
"""How the names of weights begin that Wan's transformer does not have."""
IMAGE = noise(1, 3, 4 * ROWS, 4 * COLUMNS, seed=8).clamp(-1, 1)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_base(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def weights(base: Path) -> Weights:
    return published(base)


@pytest.fixture(scope="module")
def converted(base: Path, weights: Weights, tmp_path_factory: pytest.TempPathFactory) -> ConvertedModel:
    at = tmp_path_factory.mktemp("live-avatar")
    save_file(lora(weights), at / "liveavatar.safetensors")
    return convert_checkpoint(
        write_checkpoint(at / "s2v", weights), at / "model", base=base, lora=at / "liveavatar.safetensors"
    )


def config_of(folder: Path, *, window: int | None = None, **fields: Any) -> StreamConfig:
    """That of the folder, with images of the tiny size."""
    config = StreamConfig.load(folder)
    blocks = config.blocks if window is None else replace(config.blocks, window=window)
    return replace(config, height=4 * ROWS, width=4 * COLUMNS, blocks=blocks, **fields)


@cache
def loaded(folder: Path) -> tuple[Any, Any, SpeechParts]:
    pipe = load_wan(folder, RequiredWeights(text=False, vae=True), {})
    parts = SpeechParts.load(folder / HIGH_NOISE)
    parts.features = SpeechFeatures.load(folder / FOLDER, rate=16000, layers=LAYERS, features=16)
    return pipe.transformer, pipe.vae, parts


def model(folder: Path, config: StreamConfig, inner: StepGroup | None = None, *, has_pose: bool = False) -> WanStream:
    transformer, vae, parts = deepcopy(loaded(folder))
    text = noise(1, TEXT, transformer.config.text_dim, seed=100)
    run = run_of(seed=SEED, rows=ROWS, columns=COLUMNS, has_pose=has_pose)
    network = network_of(transformer, config.blocks, parts, inner)
    return WanStream(network, config.schedule, WanDecoder(vae), run, begun_with(text))


def heard(block: int) -> Payload:
    return (samples(62 / 25, seed=300 + block).view(1, 62, 640),)


@cache
def seen(folder: Path, sign: int = 1) -> Reference:
    decoder = WanDecoder(loaded(folder)[1])
    image = sign * IMAGE
    return Reference(latents=decoder.encode(image), video=decoder.encode(image, still=NUM_FRAMES - 1))


def begun(folder: Path) -> dict[int, tuple[Change, ...]]:
    return {0: (seen(folder),)}


def streamed(folder: Path, config: StreamConfig, blocks: int = BLOCKS) -> Outcome:
    return serial(model(folder, config), begun(folder), blocks, heard)


def reference(folder: Path, weights: Weights, config: StreamConfig, blocks: int) -> list[Tensor]:
    """Steps of a block one after the other, each with keys and values of its own noise level."""
    made, net = model(folder, config), ReferenceSpeech(weights, HEADS, AFTER)
    parts: Any = made._network.audio
    text, schedule, options = made._first.text[0], config.schedule, config.blocks
    image = seen(folder)
    assert image.video is not None
    latents, earlier = image.latents[0], image.video[0]
    kept: list[list[KV]] = [[] for _ in range(schedule.steps)]
    done: list[Tensor] = []
    sinks = net.sinks(latents, earlier, text)
    for block in range(blocks):
        if block == schedule.steps:
            sinks = net.sinks(done[0][0][:, :1], earlier, text)
        features = parts.features(heard(block)[0].flatten(), 62, 25.0)[..., 50:]
        x = keyed_noise(SEED, block, 0, (1, 16, options.frames, ROWS, COLUMNS))[0]
        times = [range(options.frames * number, options.frames * (number + 1)) for number in range(block + 1)]
        first = max(0, block - options.window + 1)
        at = max(30, options.frames * block + options.sink_distance)
        for step in range(schedule.steps):
            window = [Seen(kept[step][number], times[number]) for number in range(first, block)]
            timestep, audio = 1000 * schedule.sigmas[step], net.audio(features)
            velocity, own = net.block(x, timestep, text, times[block], window, sinks, at, audio)
            kept[step].append(own)
            x = x + (schedule.sigmas[step + 1] - schedule.sigmas[step]) * velocity
        done.append(x[None])
    return done


@pytest.mark.parametrize(
    ("fields", "blocks"),
    [(SHORT, BLOCKS), pytest.param({}, 6, marks=pytest.mark.breadth)],
    ids=["short", "published"],
)
def test_live_avatar_streams_as_it_was_published(
    fields: dict[str, Any], blocks: int, converted: ConvertedModel, weights: Weights
) -> None:
    """On one rank, up to one per step and a decoder. In the end the sink is the stream's own first frame."""
    folder, config = converted.folder, config_of(converted.folder, **fields)
    assert blocks > max(config.blocks.window, config.steps)
    whole = streamed(folder, config, blocks)
    wanted = reference(folder, merged(weights, lora(weights), alpha=64), config, blocks)
    assert furthest([latents for latents, _ in whole], wanted) < EPSILON
    for ranks in range(2, config.steps + 2):
        plan = StreamPlan.even(config.pipeline_steps, ranks)
        outcome, _ = pipelined(lambda: model(folder, config), plan, Script(begun(folder), blocks, heard))
        assert differing(outcome, whole) == [], plan


def without_kind(parts: SpeechParts) -> None:
    parts.trainable_cond_mask.weight[1:] = 0


def without_audio(parts: SpeechParts) -> None:
    parts.audio_injector.injector[1].o.weight.zero_()


def without_packed(parts: SpeechParts) -> None:
    parts.frame_packer.proj_4x.weight.zero_()


def without_layer(parts: SpeechParts) -> None:
    parts.casual_audio_encoder.weights[0, 1] -= 1


def test_each_part_has_an_effect(converted: ConvertedModel) -> None:
    config = config_of(converted.folder, sigmas=(1.0, 0.0))

    def first(change: Callable[[SpeechParts], object]) -> Tensor:
        stream = model(converted.folder, config)
        parts: Any = stream._network.audio
        change(parts)
        return serial(stream, begun(converted.folder), 1, heard)[0][0]

    whole = first(lambda parts: None)
    for change in (without_kind, without_audio, without_packed, without_layer):
        assert relative(first(change), whole) > 1e-4, change


def test_the_reference_rolls_and_earlier_frames_stand(converted: ConvertedModel) -> None:
    network: Any = model(converted.folder, config_of(converted.folder))._network
    x = torch.zeros(1, 16, 3, ROWS, COLUMNS)
    tokens = ROWS * COLUMNS // 4
    one, near, far = (network._sink_rotary(x, block)[0] for block in (0, 5, 20))
    assert torch.equal(one, near)  # still at its place in training
    assert not torch.equal(one[:, :tokens], far[:, :tokens])
    assert torch.equal(one[:, tokens:], far[:, tokens:])
    assert torch.equal(far[:, :tokens], network._at(x).at([60 + network.options.sink_distance])[0])
    assert torch.equal(one[:, :tokens], network._at(x).at([REFERENCE_TIME])[0])


@torch.no_grad()
def test_a_pose(converted: ConvertedModel, weights: Weights) -> None:
    made = model(converted.folder, config_of(converted.folder))
    net = ReferenceSpeech(merged(weights, lora(weights), alpha=64), HEADS, AFTER)
    state, change = made.new_state(0), seen(converted.folder)
    made.apply(state, change)
    x, pose = noise(1, 16, 3, ROWS, COLUMNS), noise(1, 16, 3, ROWS, COLUMNS, seed=1)
    found = made._network.velocity(state.memory, x, state.now.text, BlockInputs(0, 500.0, pose=pose))
    assert change.video is not None
    sinks, text = net.sinks(change.latents[0], change.video[0], state.now.text[0]), state.now.text[0]
    net.after = ()  # no sound
    silent = (torch.zeros(0), torch.zeros(0))
    wanted, _ = net.block(x[0], 500.0, text, range(3), (), sinks, 30, silent, pose[0])
    assert relative(found[0], wanted) < EPSILON
    wanted, _ = net.block(x[0], 500.0, text, range(3), (), sinks, 30, silent)
    assert relative(found[0], wanted) > 1e-3


@torch.no_grad()
def test_a_pose_is_encoded_behind_its_first_image(converted: ConvertedModel) -> None:
    """As Wan-S2V does with a clip: one more latent frame in front, which is dropped; by diffusers' own encoder."""
    config = config_of(converted.folder)
    made = model(converted.folder, config, has_pose=True)
    vae = made._decoder.vae
    images = (noise(12, 4 * ROWS, 4 * COLUMNS, 3, seed=4) * 60 + 128).clamp(0, 255).to(torch.uint8)
    latents, tokens = noise(1, 16, 3, ROWS, COLUMNS), noise(1, 3, 6, 24)
    for first in (0, 3):  # the first block of a stream has 9 images
        *before, found = made.posed((latents, tokens), images[first:])
        assert all(map(torch.equal, before, (latents, tokens)))
        video = torch.cat([images[first:][:1]] * (1 + first) + [images[first:]]).permute(3, 0, 1, 2)[None] / 127.5 - 1
        wanted = WanDecoder(vae).normalized(vae.encode(video).latent_dist.mode())[:, :, 1:]
        assert relative(found, wanted) < EPSILON
    assert [spec.shape for spec in made.payload()] == [latents.shape, tokens.shape, latents.shape]


def test_changes_in_mid_stream_on_ranks(converted: ConvertedModel) -> None:
    folder, config = converted.folder, config_of(converted.folder, **SHORT)
    made = model(folder, config)
    other = seen(folder, -1)
    changes: dict[int, tuple[Change, ...]] = {
        **begun(folder),
        1: (Prompt(text=noise(1, TEXT, made._network.transformer.config.text_dim), transition="recache"), other),
        3: (Parameter(name="audio_scale", value=2.0),),
    }
    wanted = serial(made, changes, BLOCKS, heard)
    outcome, _ = pipelined(lambda: model(folder, config), StreamPlan.even(2, 3), Script(changes, BLOCKS, heard))
    assert differing(outcome, wanted) == []
    assert differing(wanted, streamed(folder, config)) == [1, 2, 3]


def on_rank(transport: Transport, folder: Path, config: StreamConfig, plan: StreamPlan, script: Script) -> Outcome:
    inner = part(transport, plan.stages[plan.stage_of(transport.rank)].ranks)
    return stage(transport, {transport.rank: model(folder, config, inner)}, plan, script)[0]


@pytest.mark.breadth
def test_two_ranks_share_a_step(converted: ConvertedModel) -> None:
    """Also the sink, whose tokens are no whole frames."""
    folder, config = converted.folder, config_of(converted.folder, **SHORT)
    wanted = streamed(folder, config)
    plan, script = StreamPlan(sizes=(1, 1), inner=2, decode="last"), Script(begun(folder), BLOCKS, heard)
    found = on_threads(plan.ranks, on_rank, folder, config, plan, script, deadline=60.0)
    errors = [error for error in found if isinstance(error, Exception)]
    assert not errors, errors
    assert latents_apart(found[plan.decoder], wanted) < 1e-5


def test_what_is_converted(converted: ConvertedModel, weights: Weights) -> None:
    assert (converted.family, converted.num_merged) == ("live-avatar", len(LORA_LAYERS))
    assert converted.num_weights == sum(x.numel() for x in weights.values())
    written = load_file(converted.folder / HIGH_NOISE / "speech.safetensors")
    wanted = merged(weights, lora(weights), alpha=64)
    assert written.keys() == {name for name in weights if name.startswith(SPEECH_PARTS)}
    assert all(torch.allclose(x, wanted[name], atol=1e-6) for name, x in written.items())
    facts = json.loads((converted.folder / HIGH_NOISE / "speech.json").read_text())
    assert (facts["after"], facts["layers"], facts["features"], facts["fps"]) == ([0, 1], LAYERS, 16, 25)
    assert sorted(path.name for path in (converted.folder / FOLDER).iterdir()) == [
        "config.json",
        "model.safetensors",
        "preprocessor_config.json",
    ]


def test_a_lora_is_merged_while_loading(
    converted: ConvertedModel, base: Path, weights: Weights, tmp_path: Path
) -> None:
    """Into the transformer and the other parts: the same as when it is merged by `convert`, which knows alpha."""
    save_file(lora(weights), tmp_path / "liveavatar.safetensors")
    checkpoint = write_checkpoint(tmp_path / "s2v", weights)
    plain = convert_checkpoint(checkpoint, tmp_path / "model", base=base, family="live-avatar")
    assert plain.num_merged == 0
    parts, once = SpeechParts.load(plain.folder / HIGH_NOISE), SpeechParts.load(converted.folder / HIGH_NOISE)
    name = "audio_injector.injector.1.o.weight"
    assert relative(parts.get_parameter(name), once.get_parameter(name)) > 1e-3
    options = {LORA: f"{tmp_path / 'liveavatar.safetensors'}:32"}  # alpha / rank
    pipe = load_wan(plain.folder, RequiredWeights(text=False, vae=False), options, parts)
    assert relative(parts.get_parameter(name), once.get_parameter(name)) < 1e-6
    q, at_once = "blocks.0.attn1.to_q.weight", loaded(converted.folder)[0]
    assert relative(pipe.transformer.get_parameter(q).detach(), at_once.get_parameter(q).detach()) < 1e-6


def test_its_schedule_is_that_of_the_released_code() -> None:
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3)
    scheduler.set_timesteps(4)
    assert [*TWICE_SHIFTED] == pytest.approx(scheduler.sigmas.tolist(), abs=1e-6)


@pytest.mark.parametrize(
    ("changed", "facts", "error", "message"),
    [
        ({"motion_encoder.weight": torch.ones(1)}, {}, UnsupportedModel, r"unexpected: motion_encoder\.weight"),
        ({"audio_injector.injector.2.q.bias": torch.ones(24)}, {}, UnsupportedModel, r"unexpected: audio_injector\.in"),
        ({"cond_encoder.bias": torch.ones(5)}, {}, UnsupportedModel, r"of another shape: cond_encoder\.bias"),
        ({"frame_packer.proj.bias": None}, {}, UnsupportedModel, r"missing: frame_packer\.proj\.bias"),
        ({"cond_encoder.weight": None}, {}, UnsupportedModel, r"not those of Wan-S2V: missing: cond_encoder\.weight"),
        ({"cond_encoder.weight": torch.ones(5)}, {}, UnsupportedModel, r"cond_encoder\.weight has the shape \(5,\)"),
        ({}, {"audio_inject_layers": 5}, UnsupportedModel, r"audio_inject_layers=5: it must be a list"),
        ({}, {"adain_mode": "other"}, UnsupportedModel, r"adain_mode='other': only models with adain_mode='attn_norm'"),
    ],
    ids=["unknown", "too many", "shape", "missing", "no pose", "flat pose", "no layers", "another mode"],
)
def test_what_does_not_fit_is_refused_by_name(
    changed: dict[str, Any],
    facts: dict[str, Any],
    error: Any,
    message: str,
    base: Path,
    weights: Weights,
    tmp_path: Path,
) -> None:
    known = {name: x for name, x in {**weights, **changed}.items() if x is not None}
    checkpoint = write_checkpoint(tmp_path / "s2v", known, **facts)
    with pytest.raises(error, match=message):
        convert_checkpoint(checkpoint, tmp_path / "model", base=base, family="live-avatar")
    assert not (tmp_path / "model").exists()


def test_what_is_not_there_is_named(base: Path, weights: Weights, tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "s2v", weights)
    for family in (None, "wan-s2v"):
        with pytest.raises(PlanError, match=r"Wan-S2V is not block-causal: pass the LoRA .* --family live-avatar"):
            convert_checkpoint(checkpoint, tmp_path / "model", base=base, family=family)
    (checkpoint / WAV2VEC2 / "model.safetensors").unlink()
    with pytest.raises(PlanError, match=r"wav2vec2-large-xlsr-53-english has no model.safetensors"):
        convert_checkpoint(checkpoint, tmp_path / "model", base=base, family="live-avatar")


def test_networks_that_do_not_fit_are_refused(converted: ConvertedModel) -> None:
    pipe = load_wan(converted.folder, RequiredWeights(text=False, vae=False), {})
    parts = SpeechParts.load(converted.folder / HIGH_NOISE)
    with pytest.raises(PlanError, match=r"positions='relative': .* needs positions='abs'"):
        network_of(pipe.transformer, CausalOptions(positions="relative"), parts)
    parts.config = replace(parts.config, after=(0, 2))
    with pytest.raises(UnsupportedModel, match=r"blocks up to 2, but this one has .* 2 blocks"):
        network_of(pipe.transformer, CausalOptions(), parts)


def test_without_an_image_it_is_refused(converted: ConvertedModel) -> None:
    made = model(converted.folder, config_of(converted.folder))
    with pytest.raises(PlanError, match="begin the stream with reference="):
        made.apply(made.new_state(0), Reference(latents=seen(converted.folder).latents))
