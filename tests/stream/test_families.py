"""Checkpoints of each family, as they are published: converted, streamed on ranks, equal to a forward of their own."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from typer.testing import CliRunner

from patchpar.cli import app
from patchpar.comm.transport import Transport
from patchpar.errors import PlanError, UnsupportedModel
from patchpar.models.streaming.causal.causal_wan import CausalWan
from patchpar.models.streaming.causal.step_sharding import StepGroup
from patchpar.models.streaming.checkpoint import RequiredWeights, load_wan
from patchpar.models.streaming.config import CausalOptions, StreamConfig
from patchpar.models.streaming.convert import convert_checkpoint
from patchpar.models.streaming.decoder import WanDecoder
from patchpar.models.streaming.families import FAMILIES
from patchpar.models.streaming.flow_schedule import FlowSchedule, keyed_noise
from patchpar.models.streaming.video_folder import HIGH_NOISE
from patchpar.plan.stream_plan import Decode, StreamPlan
from patchpar.stream.causal.clean_history import RecomputedHistoryStream
from patchpar.stream.causal.runner import HISTORIES
from patchpar.stream.causal.wan import WanStream
from patchpar.stream.events import Change, Prompt
from tests.breadth import first_of
from tests.stream.reference_wan import KV, ReferenceWan, Seen
from tests.stream.running import Outcome, Script, differing, pipelined, serial, stage
from tests.stream.test_clean_history import furthest
from tests.stream.test_convert import SAFETENSORS, Weights, original, prefixed
from tests.stream.test_inner import GENERATING, latents_apart, part
from tests.stream.tiny import COLUMNS, ROWS, begun_with, run_of, write_folder
from tests.tensors import noise
from tests.unit.threads import on_threads

SEED, BLOCKS, HEADS, TEXT = 7, 7, 2, 5
EPSILON = 1e-6
LORA_RANK = 2
LORA_LAYERS = ("blocks.0.self_attn.q", "blocks.1.cross_attn.o", "blocks.1.ffn.0", "blocks.0.ffn.2")


def lora_of(weights: Weights) -> Weights:
    """Factors of some layers, as PEFT names them."""
    found = {}
    for number, layer in enumerate(LORA_LAYERS):
        out, inside = weights[f"{layer}.weight"].shape
        found[f"base_model.model.{layer}.lora_A.weight"] = noise(LORA_RANK, inside, seed=2 * number)
        found[f"base_model.model.{layer}.lora_B.weight"] = 0.3 * noise(out, LORA_RANK, seed=2 * number + 1)
    return found


def merged(weights: Weights, lora: Weights, scale: float = 1.0) -> Weights:
    found = dict(weights)
    for layer in LORA_LAYERS:
        down, up = (lora[f"base_model.model.{layer}.lora_{name}.weight"] for name in "AB")
        found[f"{layer}.weight"] = weights[f"{layer}.weight"] + scale * up @ down
    return found


@dataclass(frozen=True)
class Released:
    """How a family publishes: the file's name, its content, and whether a LoRA comes with it."""

    file: str
    content: Callable[[Weights], Any]
    has_lora: bool = False


RELEASED = {
    "krea": Released("krea-realtime-video-14b.safetensors", lambda own: prefixed("model.", own)),
    "longlive": Released("longlive_base.pt", lambda own: {"generator": prefixed("model.", own)}, has_lora=True),
    "streamdiffusionv2": Released("model.pt", lambda own: {"generator": prefixed("model.", own)}),
    "self-forcing": Released("self_forcing_dmd.pt", lambda own: {"generator_ema": prefixed("model.", own)}),
    "causvid": Released("model.pt", lambda own: {"generator": prefixed("model.", own)}),
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_folder(tmp_path_factory.mktemp("base"), hears=False)
    (folder / "stream.json").unlink()
    return folder


@pytest.fixture(scope="module")
def weights(base: Path) -> Weights:
    """Wan's names, random."""
    of_base = load_file(base / HIGH_NOISE / SAFETENSORS)
    changed = {name: x + 0.1 * noise(*x.shape, seed=number) for number, (name, x) in enumerate(of_base.items())}
    return original(changed)


@pytest.fixture(scope="module")
def converted(base: Path, weights: Weights, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folders: dict[str, Path] = {}

    def folder(family: str) -> Path:
        if family not in folders:
            at, released = tmp_path_factory.mktemp(family), RELEASED[family]
            content, lora = released.content(weights), None
            file = at / released.file
            save_file(content, file) if file.suffix == ".safetensors" else torch.save(content, file)
            if released.has_lora:
                lora = at / "lora.pt"
                torch.save({"generator_lora": lora_of(weights)}, lora)
            found = convert_checkpoint(file, at / "model", base=base, family=family, lora=lora)
            assert found.num_merged == (len(LORA_LAYERS) if released.has_lora else 0)
            folders[family] = found.folder
        return folders[family]

    return folder


def model(folder: Path, config: StreamConfig, inner: StepGroup | None = None) -> WanStream:
    pipe = load_wan(folder, RequiredWeights(text=False, vae=True), {})
    text = noise(1, TEXT, pipe.transformer.config.text_dim, seed=100)
    run, first = run_of(seed=SEED, adapt_sink=config.adapt_sink), begun_with(text)
    network = CausalWan(pipe.transformer, config.blocks, inner=inner)
    return HISTORIES[config.blocks.history](network, config.schedule, WanDecoder(pipe.vae), run, first)


Texts = Mapping[int, tuple[str, Tensor]]
"""Another prompt by the block from which it holds, and what becomes of the window: switch, cut or recache."""


class Published:
    """A family's own loop over blocks and steps, with keys and values kept as the papers say."""

    def __init__(self, weights: Weights, config: StreamConfig, vae: Any, text: Tensor, texts: Texts) -> None:
        self.net, self.options, self.schedule = ReferenceWan(weights, HEADS), config.blocks, config.schedule
        self.vae, self.text, self.texts = vae, text[0], texts
        self.done: list[Tensor] = []
        self.cut = 0  # the first block that later ones see
        steps = self.schedule.steps  # of histories that all steps share there is the first list only
        self.kept: list[list[KV]] = [[] for _ in range(steps)]
        self.read: list[list[Tensor]] = [[] for _ in range(steps)]  # of which these keys and values are

    def stream(self, blocks: int = BLOCKS) -> list[Tensor]:
        shape = (1, 16, self.options.frames, ROWS, COLUMNS)
        for block in range(blocks):
            self.change_text(block)
            x = keyed_noise(SEED, block, 0, shape)[0]
            fixed = self.recomputed() if self.options.history == "recompute" else None
            for step in range(self.schedule.steps):
                history = self.kept[step if self.options.history == "noisy" else 0]
                seen, frames = fixed or self.window(history)
                velocity, own = self.net(x, self.schedule.timestep(step), self.text, frames, seen)
                if self.options.history == "noisy":
                    history.append(own)
                    self.read[step].append(x)
                x = self.advanced(step, x, velocity, block, shape)
            if self.options.history == "clean":
                self.keep(0, x, 0.0)
                self.read[0].append(x)
            self.done.append(x[None])
        return self.done

    def keep(self, step: int, x: Tensor, timestep: float) -> None:
        seen, frames = self.window(self.kept[step])
        self.kept[step].append(self.net(x, timestep, self.text, frames, seen)[1])

    def change_text(self, block: int) -> None:
        transition, text = self.texts.get(block, ("switch", self.text[None]))
        self.text = text[0]
        if transition == "cut":
            self.kept, self.read = [[] for _ in self.kept], [[] for _ in self.read]
            self.cut = block
        for step, history in enumerate(self.kept if transition == "recache" else []):
            count = min(self.options.window - 1, len(history) - self.options.sinks)
            del history[self.options.sinks :]
            for x in self.read[step][-count:] if count > 0 else []:
                self.keep(step, x, self.schedule.timestep(step) if self.options.history == "noisy" else 0.0)

    def advanced(self, step: int, x: Tensor, velocity: Tensor, block: int, shape: tuple[int, ...]) -> Tensor:
        sigma, after = self.schedule.sigmas[step : step + 2]
        clean = x - sigma * velocity
        return clean if after == 0 else (1 - after) * clean + after * keyed_noise(SEED, block, step + 1, shape)[0]

    def window(self, history: Sequence[KV]) -> tuple[list[Seen], range]:
        """The first blocks and the last ones, in the cache in this order; positions by time, or by the cache."""
        options, block = self.options, len(history)
        recent = options.window - options.sinks - 1
        numbers = [n for n in range(block) if n < options.sinks or n >= block - recent]
        times = numbers if options.positions == "abs" else list(range(len(numbers)))
        own = block if options.positions == "abs" else len(numbers)
        seen = [Seen(history[n], self.frames(at)) for n, at in zip(numbers, times, strict=True)]
        return seen, self.frames(own)

    def frames(self, block: int) -> range:
        return range(block * self.options.frames, (block + 1) * self.options.frames)

    def recomputed(self) -> tuple[list[Seen], range]:
        """Krea: the last frames, of which the first is the encoding of an image unless it is the video's first."""
        frames = self.options.frames
        context = self.done[max(self.cut, len(self.done) - self.options.window + 1) :]
        if len(self.done) > len(context) > 0:
            images = decoded(self.vae, torch.cat(self.done, 2))
            per_latent = self.vae.config.scale_factor_temporal
            image = images[:, :, -1 - (len(context) * frames - 1) * per_latent][:, :, None]
            context = [torch.cat([encoded(self.vae, image), context[0][:, :, 1:]], 2), *context[1:]]
        seen: list[Seen] = []
        for number, latents in enumerate(context):
            _, own = self.net(latents[0], 0.0, self.text, self.frames(number), seen)
            seen.append(Seen(own, self.frames(number)))
        return seen, self.frames(len(context))


def scale_of(vae: Any) -> tuple[Tensor, Tensor]:
    mean, std = (torch.tensor(x).view(1, -1, 1, 1, 1) for x in (vae.config.latents_mean, vae.config.latents_std))
    return mean, std


@torch.no_grad()
def decoded(vae: Any, latents: Tensor) -> Tensor:
    mean, std = scale_of(vae)
    return vae.decode(latents * std + mean).sample


@torch.no_grad()
def encoded(vae: Any, images: Tensor) -> Tensor:
    mean, std = scale_of(vae)
    return (vae.encode(images).latent_dist.mode() - mean) / std


def reference(folder: Path, weights: Weights, config: StreamConfig, texts: Texts | None = None) -> list[Tensor]:
    pipe = load_wan(folder, RequiredWeights(text=False, vae=True), {})
    text = noise(1, TEXT, pipe.transformer.config.text_dim, seed=100)
    return Published(weights, config, pipe.vae, text, texts or {}).stream()


@pytest.mark.parametrize("family", first_of([*RELEASED], "longlive"))
def test_a_family_streams_as_it_was_published(family: str, converted: Any, weights: Weights) -> None:
    folder = converted(family)
    config = StreamConfig.load(folder)
    own = merged(weights, lora_of(weights)) if RELEASED[family].has_lora else weights
    wanted = reference(folder, own, config)
    whole = serial(model(folder, config), {}, BLOCKS, hears=False)
    assert furthest([latents for latents, _ in whole], wanted) < EPSILON
    for ranks in (2, 3) if config.blocks.is_pipelined else (2,):
        plan = StreamPlan.even(config.pipeline_steps, ranks)
        outcome, _ = pipelined(lambda: model(folder, config), plan, Script({}, BLOCKS, hears=False))
        assert differing(outcome, whole) == [], plan


def test_without_the_lora_it_is_another_stream(converted: Any, weights: Weights) -> None:
    folder = converted("longlive")
    config = StreamConfig.load(folder)
    found = [latents for latents, _ in serial(model(folder, config), {}, 3, hears=False)]
    assert furthest(found, reference(folder, weights, config)[:3]) > 1e-3


@pytest.mark.parametrize(
    ("family", "other"),
    first_of(
        [
            ("longlive", {"sinks": 0}),
            ("longlive", {"positions": "abs"}),
            ("krea", {"history": "clean"}),
            ("streamdiffusionv2", {"sinks": 0}),
            ("streamdiffusionv2", {"history": "clean"}),
        ],
        ("longlive", {"sinks": 0}),
        ("krea", {"history": "clean"}),
    ),
    ids=str,
)
def test_each_property_of_a_family_matters(family: str, other: dict[str, Any], converted: Any) -> None:
    """The first blocks are equal, as far as their window reaches back to the first one."""
    folder = converted(family)
    config = StreamConfig.load(folder)
    changed = replace(config, blocks=replace(config.blocks, **other))
    one, two = (
        [latents for latents, _ in serial(model(folder, each), {}, BLOCKS, hears=False)] for each in (config, changed)
    )
    assert furthest(one[:1], two[:1]) < EPSILON
    assert furthest(one, two) > 1e-3


def test_the_image_that_is_encoded_anew_matters(converted: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = converted("krea")
    config = StreamConfig.load(folder)
    wanted = [latents for latents, _ in serial(model(folder, config), {}, 4, hears=False)]
    plain = lambda self, state: [payload for _, payload in state.recent]  # noqa: E731
    monkeypatch.setattr(RecomputedHistoryStream, "_window", plain)
    found = [latents for latents, _ in serial(model(folder, config), {}, 4, hears=False)]
    assert furthest(found[:2], wanted[:2]) < EPSILON
    assert furthest(found, wanted) > 1e-3


@pytest.mark.parametrize("family", first_of(["longlive", "krea", "streamdiffusionv2"], "longlive"))
def test_changes_of_the_prompt_are_the_published_ones_on_ranks(family: str, converted: Any, weights: Weights) -> None:
    """Two blocks from one prompt to the next, a window that stays, one of the new prompt, and none."""
    folder = converted(family)
    config = StreamConfig.load(folder)
    made = model(folder, config)
    old, *texts = (noise(1, TEXT, made._network.transformer.config.text_dim, seed=100 + n) for n in range(5))
    changes: dict[int, tuple[Change, ...]] = {
        1: (Prompt(text=texts[0], transition="blend", over=2),),
        3: (Prompt(text=texts[1]),),
        4: (Prompt(text=texts[2], transition="recache"),),
        5: (Prompt(text=texts[3], transition="cut"),),
    }
    blended = {1: ("switch", (old + texts[0]) / 2), 2: ("switch", texts[0])}
    same = {**blended, 3: ("switch", texts[1]), 4: ("recache", texts[2]), 5: ("cut", texts[3])}
    outcome = serial(made, changes, BLOCKS, hears=False)
    found, own = [latents for latents, _ in outcome], weights
    if RELEASED[family].has_lora:
        own = merged(weights, lora_of(weights))
    assert furthest(found, reference(folder, own, config, same)) < EPSILON
    for block in (5,) if config.blocks.history == "recompute" else (4, 5):
        other = {**same, block: ("switch", same[block][1])}
        assert furthest(found, reference(folder, own, config, other)) > 1e-3, "the control: what becomes of the window"
    plan = StreamPlan.even(config.pipeline_steps, 2)
    spread, _ = pipelined(lambda: model(folder, config), plan, Script(changes, BLOCKS, hears=False))
    assert differing(spread, outcome) == []


def on_rank(transport: Transport, folder: Path, config: StreamConfig, plan: StreamPlan, script: Script) -> Outcome:
    with GENERATING:
        made = model(folder, config, part(transport, plan.stages[plan.stage_of(transport.rank)].ranks))
    return stage(transport, {transport.rank: made}, plan, script)[0]


@pytest.mark.breadth
@pytest.mark.parametrize("family", ["longlive", "krea", "streamdiffusionv2"])
def test_ranks_that_share_the_steps_of_a_family(family: str, converted: Any) -> None:
    """Up to rounding the stream of one process, whichever rank decodes."""
    folder = converted(family)
    config = StreamConfig.load(folder)
    text = noise(1, TEXT, model(folder, config)._network.transformer.config.text_dim, seed=5)
    changes = {3: (Prompt(text=text, transition="recache"),)}
    wanted = serial(model(folder, config), changes, BLOCKS, hears=False)
    for decode in get_args(Decode):
        plan = StreamPlan(sizes=(1,) * config.pipeline_steps, inner=2, decode=decode)
        script = Script(changes, BLOCKS, hears=False)
        found = on_threads(plan.ranks, on_rank, folder, config, plan, script, deadline=60.0)
        errors = [error for error in found if isinstance(error, Exception)]
        assert not errors, errors
        assert latents_apart(found[plan.decoder], wanted) < 1e-5


@torch.no_grad()
def test_sinks_outlive_a_recache_and_not_a_cut(converted: Any) -> None:
    """After a recache the window is that of the new prompt but for its sinks; after a cut there is none."""
    folder = converted("longlive")
    config = StreamConfig.load(folder)
    made = model(folder, config)
    state = made.new_state(0)
    for block in range(config.blocks.window + 1):
        made.step(state, block, made.begin(block, ()))
    before = values_of_blocks(state, config)
    text = noise(1, TEXT, made._network.transformer.config.text_dim, seed=5)
    made.apply(state, Prompt(text=text, transition="recache"))
    after = values_of_blocks(state, config)
    kept = [torch.equal(one, two) for one, two in zip(before, after, strict=True)]
    assert kept == [True] * config.blocks.sinks + [False] * (config.blocks.window - config.blocks.sinks)
    made.apply(state, Prompt(text=text, transition="cut"))
    assert values_of_blocks(state, config) == []


def values_of_blocks(state: Any, config: StreamConfig) -> list[Tensor]:
    """Values of the last layer, which depend on the prompt, of each visible block."""
    _, values = state.memory.visible(-1)
    count = state.memory.visible_blocks
    assert count <= config.blocks.window
    return [each.clone() for each in values.chunk(count, 1)] if count else []


def test_numbers_of_sinks_that_cannot_be_are_refused() -> None:
    assert CausalOptions(frames=1, window=4, sinks=3).sinks == 3
    for bad, message in (
        ({"sinks": 4}, r"sinks=4: it must be a whole number from 0 to 3"),
        ({"sinks": 1, "history": "recompute"}, r"sinks=1 with history='recompute'.*use sinks=0"),
        ({"history": "recent"}, r"history='recent': use 'noisy' or 'clean' or 'recompute'"),
    ):
        with pytest.raises(PlanError, match=message):
            CausalOptions(frames=1, window=4, **bad)  # type: ignore[arg-type]


def test_a_model_that_is_not_block_causal(base: Path, weights: Weights, tmp_path: Path) -> None:
    """Wan's own names, for FIFO."""
    save_file(weights, tmp_path / "wan.safetensors")
    words = ["convert", str(tmp_path / "wan.safetensors"), "--to", str(tmp_path / "model"), "--base", str(base)]
    result = CliRunner().invoke(app, [*words, "--family", "wan"])
    assert result.exit_code == 0, result.output
    assert "it is not block-causal: use patchpar video, or patchpar fifo" in result.stdout
    assert not (tmp_path / "model" / "stream.json").exists()
    written = original(load_file(tmp_path / "model" / HIGH_NOISE / SAFETENSORS))
    assert all(torch.equal(written[name], weights[name]) for name in weights)


@pytest.mark.parametrize("family", ["krea", "longlive", "streamdiffusionv2"])
def test_unknown_keys_are_refused_by_name(family: str, base: Path, weights: Weights, tmp_path: Path) -> None:
    released = RELEASED[family]
    content = released.content({**weights, "motion_encoder.weight": torch.ones(1)})
    file = tmp_path / released.file
    save_file(content, file) if file.suffix == ".safetensors" else torch.save(content, file)
    with pytest.raises(UnsupportedModel, match=r"unexpected: motion_encoder\.weight"):
        convert_checkpoint(file, tmp_path / "model", base=base, family=family)
    assert not (tmp_path / "model").exists()


def test_a_schedule_of_a_family_is_that_of_its_paper(converted: Any) -> None:
    def known(family: str) -> dict[str, Any]:
        return json.loads((converted(family) / "stream.json").read_text())

    assert known("krea")["sigmas"] == pytest.approx([1.0, 0.9375, 0.8333333, 0.625, 0.0])
    assert known("longlive")["sigmas"] == list(FlowSchedule.shifted(4, shift=5.0).sigmas)
    assert known("longlive")["blocks"] == {
        "frames": 3,
        "window": 4,
        "sinks": 1,
        "positions": "relative",
        "history": "clean",
    }


@dataclass(frozen=True)
class PublishedStream:
    """As configurations of the released code say it: timesteps, their shift, and all else in latent frames."""

    timesteps: tuple[int, ...]
    frames: int
    window: int
    sinks: int = 0
    shift: float = 1.0

    @property
    def sigmas(self) -> list[float]:
        """Noise levels of the timesteps, warped by the shift of the schedule they are trained with."""
        return [self.shift * t / (1000 + (self.shift - 1) * t) for t in self.timesteps]


WARPED = (1000, 750, 500, 250, 0)
PUBLISHED = {
    "self-forcing": PublishedStream(WARPED, frames=3, window=21, shift=5),
    "causvid": PublishedStream((1000, 757, 522, 0), frames=3, window=21),
    "krea": PublishedStream(WARPED, frames=3, window=6, shift=5),
    "longlive": PublishedStream(WARPED, frames=3, window=12, sinks=3, shift=5),
    "streamdiffusionv2": PublishedStream((700, 500, 0), frames=1, window=6, sinks=3),
}


def test_noise_levels_of_the_families_are_those_published() -> None:
    """`denoising_step_list` of each repository's configuration, warped with `timestep_shift` where it warps them.

    Self-Forcing (arXiv:2506.08009, github.com/guandeh17/Self-Forcing), which Krea Realtime
    (github.com/krea-ai/realtime-video) and LongLive (arXiv:2509.22622, github.com/NVlabs/LongLive) follow; CausVid
    (arXiv:2412.07772, github.com/tianweiy/CausVid); StreamDiffusionV2 (arXiv:2511.07399,
    github.com/chenfengxu714/StreamDiffusionV2). That of Live Avatar is diffusers' own: see test_speech.
    """
    streamed = {name for name, family in FAMILIES.items() if family.stream is not None}
    assert streamed == {*PUBLISHED, "live-avatar"}
    for family, wanted in PUBLISHED.items():
        stream = FAMILIES[family].stream
        assert stream is not None
        assert [*stream["sigmas"]] == pytest.approx(wanted.sigmas, abs=1e-7), family
        assert stream["sampler"] == "renoise", family


def test_windows_and_sinks_of_the_families_are_those_published() -> None:
    """In latent frames, the block's own included: caches of the code that is named above.

    Self-Forcing and CausVid keep the 21 frames of their training videos, LongLive 12 of which the first 3 stay
    (`local_attn_size`, `sink_size`), StreamDiffusionV2 6 of which the first 3 stay (`num_kv_cache`,
    `num_sink_tokens`), Krea computes 3 frames anew before each block, and Live Avatar (arXiv:2512.04677, section 4.1)
    attends to 4 blocks of 3 beside its reference.
    """
    for family, wanted in {**PUBLISHED, "live-avatar": PublishedStream((), frames=3, window=12)}.items():
        stream = FAMILIES[family].stream
        assert stream is not None
        blocks = StreamConfig.of(stream).blocks
        found = (blocks.frames, blocks.window * blocks.frames, blocks.sinks * blocks.frames)
        assert found == (wanted.frames, wanted.window, wanted.sinks), family
