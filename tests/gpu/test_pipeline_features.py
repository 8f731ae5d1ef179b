"""Pipelines with features whose denoiser calls are replayed: the images without graphs, to the bit, and plain ones."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from diffusers import FasterCacheConfig, MultiControlNetModel
from diffusers.guiders import AutoGuidance, ClassifierFreeGuidance, SkipLayerGuidance
from diffusers.hooks import LayerSkipConfig
from diffusers.modular_pipelines.stable_diffusion_xl import StableDiffusionXLAutoBlocks
from peft import LoraConfig
from peft.utils import get_peft_model_state_dict

from benchmarks.coverage.pipelines.guided import ENTRIES
from patchpar.comm.transport.torch_p2p import TorchTransport
from patchpar.errors import PlanError
from patchpar.pipeline import installed_graphs, runner
from patchpar.pipeline.messages import CallOptions
from patchpar.pipeline.runner import PipelineRunner
from patchpar.plan.plan import Plan
from patchpar.shard.graphs.step_graphs import StepGraphs
from tests import tiny
from tests.conformance.stand_in import StandIn
from tests.contexts import ThreadContext
from tests.gpu.op_tape import TapeRecorder
from tests.gpu.test_pipeline_graphs import SIZES, STEPS, Feature, _arguments, _values, generated, moved
from tests.tiny import sample_images

ROUNDING = 2e-4
LORAS = ("ink", "snow")


def no_time() -> int:
    """What a cache asks for."""
    return 500


def weight(module: Any) -> float:
    """Of the attention that FasterCache estimates."""
    return 0.5


def cached(pipe: Any) -> Any:
    pipe.transformer.enable_cache(
        FasterCacheConfig(
            spatial_attention_block_skip_range=2,
            spatial_attention_timestep_skip_range=(-1, 1001),
            unconditional_batch_skip_range=2,
            unconditional_batch_timestep_skip_range=(-1, 1001),
            current_timestep_callback=no_time,
            attention_weight_callback=weight,
            tensor_format="BFCHW",
        )
    )
    return pipe


def with_guider(guider: Any) -> Any:
    def prepared(pipe: Any) -> Any:
        pipe.guider = guider.new()  # which has a state
        return pipe

    return prepared


def guided() -> tuple[Any, dict[str, Any]]:
    (entry,) = (each for each in ENTRIES if each.name == "HunyuanImagePipeline")
    return entry.make()


def modular() -> tuple[Any, dict[str, Any]]:
    """A modular pipeline with the networks of a tiny SDXL."""
    found, pipe = tiny.build("sdxl"), StableDiffusionXLAutoBlocks().init_pipeline()
    parts = found.pipe.components.items()
    pipe.update_components(**{name: part for name, part in parts if part and name in pipe.component_names})
    return pipe, {"prompt": "a fox", "output": "images"}


def with_worse_guidance(pipe: Any) -> Any:
    """Hooks in the second call of late steps."""
    config = LayerSkipConfig(indices=[0], fqn="mid_block.attentions.0.transformer_blocks")
    pipe.update_components(guider=AutoGuidance(auto_guidance_config=config, guidance_scale=5.0, start=0.5))
    return pipe


def with_two_controlnets(pipe: Any) -> Any:
    pipe.controlnet.controlnet_cond_embedding.conv_out.weight.data.mul_(1e5)  # a new one hardly looks at its image
    pipe.controlnet = MultiControlNetModel([pipe.controlnet, copy.deepcopy(pipe.controlnet)])
    return pipe


def two_images(number: int) -> dict[str, Any]:
    scene = sample_images.scene()
    return {"image": [scene, scene.rotate(90)], "controlnet_conditioning_scale": [1.0, 0.5 + number]}


@pytest.fixture(scope="module")
def loras(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("loras")
    for seed, name in enumerate(LORAS):
        pipe = tiny.build("sd").pipe
        torch.manual_seed(seed)
        pipe.unet.add_adapter(LoraConfig(r=4, lora_alpha=4, init_lora_weights=False, target_modules=["to_q", "to_v"]))
        layers = get_peft_model_state_dict(pipe.unet)
        pipe.save_lora_weights(folder, unet_lora_layers=layers, weight_name=f"{name}.safetensors")
    return folder


def of_file(folder: Path, name: str) -> tuple[str, tuple[Any, ...], dict[str, Any]]:
    return "load_lora_weights", (str(folder),), {"weight_name": f"{name}.safetensors", "adapter_name": name}


def with_lora(folder: Path) -> Any:
    def prepared(pipe: Any) -> Any:
        path, args, kwargs = of_file(folder, LORAS[0])
        getattr(pipe, path)(*args, **kwargs)
        return pipe

    return prepared


def swapped(folder: Path) -> Any:
    def between(engine: Any) -> None:
        engine.apply("unload_lora_weights", (), {})
        engine.apply(*of_file(folder, LORAS[1]))

    return between


def inverted(engine: Any) -> None:
    vectors = torch.randn(2, engine.pipe.text_encoder.config.hidden_size, generator=torch.Generator().manual_seed(1))
    engine.apply("load_textual_inversion", (vectors,), {"token": "<fox>"})


def of_fox(number: int) -> dict[str, Any]:
    return {"prompt": "a <fox> in the snow"}


class Numbers(diffusers.DDIMScheduler):  # type: ignore[misc]  # diffusers is not typed
    """Whose timesteps are numbers of Python."""

    def set_timesteps(self, *args: Any, **kwargs: Any) -> None:
        super().set_timesteps(*args, **kwargs)
        self.timesteps = [float(each) for each in self.timesteps]

    def step(self, model_output: Any, timestep: float, *args: Any, **kwargs: Any) -> Any:
        return super().step(model_output, int(timestep), *args, **kwargs)


def with_numbers(pipe: Any) -> Any:
    pipe.scheduler = Numbers.from_config(pipe.scheduler.config)
    return pipe


def features(folder: Path) -> dict[str, tuple[str, str, Feature]]:
    layers = LayerSkipConfig(indices=[0], fqn="transformer_blocks")
    skipping = with_guider(
        SkipLayerGuidance(
            guidance_scale=5.0, skip_layer_config=layers, skip_layer_guidance_start=0.5, skip_layer_guidance_stop=1.0
        )
    )
    scaled = with_guider(ClassifierFreeGuidance(guidance_scale=4.0))
    return {
        "FasterCache": ("cogvideox", "patch=1", Feature(cached)),
        "a guider": ("", "cfg=2", Feature(scaled, builds=guided)),
        "layers that a guider skips": ("", "patch=1", Feature(skipping, builds=guided)),
        "hooks of a guider in late steps": ("", "patch=1", Feature(with_worse_guidance, builds=modular)),
        "a LoRA of another file": ("sd", "patch=2", Feature(with_lora(folder), between=swapped(folder))),
        "several ControlNets": ("sd_controlnet", "cfg=2", Feature(with_two_controlnets, two_images)),
        "several ControlNets in bands": ("sd_controlnet", "patch=2", Feature(with_two_controlnets, two_images)),
        "textual inversion": ("sd", "patch=2", Feature(of_call=of_fox, between=inverted)),
        "AnimateDiff": ("animatediff", "cfg=2", Feature()),
        "timesteps that are numbers": ("sd", "patch=2", Feature(with_numbers)),
        "timesteps that are numbers, on one device": ("sd", "patch=1", Feature(with_numbers)),
        "Z-Image": ("zimage", "patch=2", Feature()),
        "Z-Image, its branches apart": ("zimage", "cfg=2", Feature()),
    }


NAMES = tuple(features(Path()))
NOT_CAPTURED = {"FasterCache", "a guider", "layers that a guider skips"}
"""Blocks that hooks skip, and texts whose length a network finds in a mask."""


def plain(name: str, feature: Feature) -> list[Any]:
    """The images of plain diffusers."""
    found = feature.built(name)
    found = replace(found, pipe=feature.prepare(found.pipe))
    found.pipe.set_progress_bar_config(disable=True)

    def apply(path: str, args: Any, kwargs: Any) -> Any:
        return attrgetter(path)(found.pipe)(*args, **kwargs)

    images = []
    for number, (height, width) in enumerate(SIZES[:1] * 2):
        if number == 1:
            feature.between(SimpleNamespace(pipe=found.pipe, apply=apply))
        images.append(_values(found.pipe(**_arguments(found, height, width) | feature.of_call(number))))
    return images


@pytest.mark.breadth
@pytest.mark.parametrize("which", NAMES)
def test_images_are_those_without_graphs_and_of_one_process(
    monkeypatch: pytest.MonkeyPatch, loras: Path, which: str
) -> None:
    name, plan, feature = features(loras)[which]
    wanted = generated(monkeypatch, name, plan, graphs=False, feature=feature, between=feature.between)
    found = generated(monkeypatch, name, plan, graphs="auto", feature=feature, between=feature.between)
    assert found.images == wanted.images
    for got, want in zip(found.images, plain(name, feature), strict=True):
        values = np.frombuffer(got, want.dtype).reshape(want.shape)
        assert np.linalg.norm(values - want) <= ROUNDING * np.linalg.norm(want)
    assert (min(map(sum, found.replays)) > 0) == (which not in NOT_CAPTURED)


@pytest.mark.breadth
def test_two_pipelines_of_one_process_with_the_same_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """One after the other: the second is refused until the first has left the network."""
    pipe, stand_in = tiny.build("sd").pipe, StandIn(1)
    parts = {name: each for name, each in pipe.components.items() if name != "image_encoder"}
    other = diffusers.StableDiffusionImg2ImgPipeline(**parts, requires_safety_checker=False)
    call = {"prompt": "a fox", "num_inference_steps": STEPS, "output_type": "np"}
    calls = call | {"height": 64, "width": 64}, call | {"image": sample_images.scene(), "strength": 0.9}
    pipes = pipe, other
    monkeypatch.setattr(runner, "silence_libraries", lambda: None)
    monkeypatch.setattr(installed_graphs, "recorder_for", lambda *_, **__: TapeRecorder(stand_in.rank))
    monkeypatch.setattr(installed_graphs, "has_graphs", lambda kind: True)

    def given(number: int) -> dict[str, Any]:
        return calls[number] | {"generator": torch.Generator().manual_seed(3)}

    def on_rank(transport: TorchTransport) -> list[tuple[int, Any, int]]:
        engines = [PipelineRunner(ThreadContext(0, 1)) for _ in pipes]  # type: ignore[arg-type]
        options, results = CallOptions(plan=Plan(), verify=False, quiet=True, graphs=True), []
        for engine, each in zip(engines, pipes, strict=True):
            engine._connection.transport = transport
            engine.adopt(each)
        for number in (0, 1, 0):
            for _ in "ab":
                result = engines[number].generate(given(number), options)
                results.append((number, _values(result.output), result.figures[0].replayed_calls))
            with pytest.raises(PlanError, match="which both have: call its restore"):
                engines[1 - number].generate(given(1 - number), options)
            engines[number].restore()
        return results

    for each in pipes:
        each.set_progress_bar_config(disable=True)
    wanted = [_values(each(**given(number))) for number, each in enumerate(pipes)]
    (found,) = stand_in.run(on_rank)
    assert not isinstance(found, BaseException), found
    assert [number for number, *_ in found] == [0, 0, 1, 1, 0, 0]
    assert all(np.array_equal(image, wanted[number]) and replays for number, image, replays in found)


def test_a_call_outside_of_the_pipeline_replays_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing tells that the network has changed before it."""
    calls, run = list[Any](), StepGraphs.run

    def recorded(self: StepGraphs, kind: Any, step: Any, call: Any, state: Any) -> Any:
        calls.append(call)
        return run(self, kind, step, call, state)

    def between(engine: PipelineRunner) -> None:
        (args, kwargs), unet = calls[-1], engine.pipe.unet
        with torch.no_grad():
            before = unet(*args, **kwargs)[0]
            moved(engine)
            assert not torch.equal(unet(*args, **kwargs)[0], before)

    monkeypatch.setattr(StepGraphs, "run", recorded)
    found = generated(monkeypatch, "sd", "patch=1", graphs=True, between=between)
    assert [list(each) for each in found.replays] == [[STEPS - 2, STEPS - 2]]


@pytest.mark.breadth
def test_an_older_callback_changes_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    pipes = list[Any]()

    def kept(pipe: Any) -> Any:
        pipes.append(pipe)
        return pipe

    def callback(step: int, timestep: Any, latents: Any) -> None:
        if step == 2:
            moved(SimpleNamespace(pipe=pipes[-1]))

    feature = Feature(kept, lambda _: {"callback": callback, "callback_steps": 1, "num_inference_steps": 6})
    wanted = generated(monkeypatch, "sd", "patch=1", graphs=False, feature=feature)
    found = generated(monkeypatch, "sd", "patch=1", graphs=True, feature=feature)
    assert found.images == wanted.images
    assert wanted.images[0] != wanted.images[1]
    assert [list(each) for each in found.replays] == [[3, 4]], "captured anew"


def with_another_scheduler(pipe: Any) -> None:
    pipe.scheduler = diffusers.EulerDiscreteScheduler.from_config(pipe.scheduler.config)


def in_half_precision(pipe: Any) -> None:
    pipe.to(torch.bfloat16)


def less_precise(pipe: Any) -> None:
    torch.set_float32_matmul_precision("medium")


def dividing_attention(pipe: Any) -> None:
    pipe.enable_attention_slicing(1)


def edited(pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
    """Latents where they lie, and another text."""
    tensors["latents"].mul_(1.05)
    return {"prompt_embeds": tensors["prompt_embeds"] * (0.9 if step == 2 else 1.0)}


TURNS: tuple[tuple[dict[str, Any], Callable[[Any], object]], ...] = (
    ({}, id),
    ({"guidance_scale": 1.0}, id),
    ({"guidance_scale": 7.0}, id),
    ({"num_images_per_prompt": 2}, id),
    ({"prompt": ["a fox", "a hen"], "generator": [torch.Generator().manual_seed(each) for each in (4, 5)]}, id),
    ({"negative_prompt": "snow", "guidance_rescale": 0.7}, id),
    ({}, with_another_scheduler),
    ({"timesteps": [901, 701, 501, 301, 101]}, id),
    ({"callback_on_step_end": edited, "callback_on_step_end_tensor_inputs": ["latents", "prompt_embeds"]}, id),
    ({}, less_precise),
    ({}, dividing_attention),
    ({"height": 96, "width": 64}, id),
    ({}, in_half_precision),
    ({"guidance_scale": 7.0}, id),
)
"""Arguments of calls one after the other, and what is done to the pipeline before each."""


@pytest.mark.breadth
def test_calls_that_differ_in_all_that_a_caller_can_set(monkeypatch: pytest.MonkeyPatch) -> None:
    pipes, before = list[Any](), torch.get_float32_matmul_precision()

    def kept(pipe: Any) -> Any:
        pipes.append(pipe)
        return pipe

    def of_call(number: int) -> dict[str, Any]:
        arguments, change = TURNS[number]
        change(pipes[-1])
        return copy.deepcopy(arguments)

    images, replays = [], []
    for graphs in (False, True):
        feature, sizes = Feature(kept, of_call), SIZES[:1] * len(TURNS)
        try:
            found = generated(monkeypatch, "sd", "patch=1", graphs=graphs, sizes=sizes, feature=feature)
        finally:
            torch.set_float32_matmul_precision(before)
        images.append(found.images)
        replays.append(list(found.replays[0]))
    assert [one == other for one, other in zip(*images, strict=True)] == [True] * len(TURNS)
    assert min(replays[1]) > 0
