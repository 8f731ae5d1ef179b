"""Whole pipelines whose denoiser calls are replayed: the images of the same pipelines without graphs, to the bit.

Ranks are threads over NCCL's simulator, and a tape of operators takes the place of a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import AutoPipelineForText2Image, FirstBlockCacheConfig
from diffusers.models.attention_processor import AttnProcessor, AttnProcessor2_0
from peft import LoraConfig

from patchpar.comm.transport.torch_p2p import TorchTransport
from patchpar.errors import PlanError, UnsupportedModel
from patchpar.pipeline import installed_graphs, runner
from patchpar.pipeline.installed_graphs import needs_hooks
from patchpar.pipeline.messages import CallOptions
from patchpar.pipeline.runner import PipelineRunner
from patchpar.pipeline.startup import check_request
from patchpar.plan.plan import Plan
from patchpar.shard.graphs.recorder import recorder_for
from tests import tiny
from tests.breadth import first_of
from tests.conformance.stand_in import StandIn
from tests.contexts import ThreadContext
from tests.gpu.op_tape import TapeRecorder

STEPS = 5
SIZES = ((64, 64), (64, 96))  # rows, columns
CALLS_OF_A_STEP = {"flux": 2}  # of pipelines that call their denoiser for each guidance branch
PLANS = ("patch=2", "patch=2,strategy=displaced:warmup_steps=1", "cfg=2,patch=2,strategy=fresh-edges")
DISPLACED = PLANS[1]
Between = Callable[[PipelineRunner], object]


@dataclass(frozen=True, slots=True)
class Images:
    """Images of calls one after the other, and how many denoiser calls of each were replays, by rank."""

    images: Sequence[bytes]
    replays: Sequence[Sequence[int]]


@dataclass(frozen=True, slots=True)
class Feature:
    """What calls of a pipeline use. `prepare`: its networks; `of_call`: arguments of a call; `between`: calls.

    `builds`: a pipeline that is none of the tiny ones, and its call.
    """

    prepare: Callable[[Any], Any] = lambda pipe: pipe
    of_call: Callable[[int], dict[str, Any]] = lambda number: {}
    between: Between = lambda engine: None
    builds: Callable[[], tuple[Any, dict[str, Any]]] | None = None

    def built(self, name: str) -> tiny.Tiny:
        if self.builds is None:
            found = tiny.build(name)
        else:
            pipe, call = self.builds()
            found = tiny.Tiny(name=name, pipe=pipe, call_kwargs=call)
        return found


def generated(
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    plan: str,
    *,
    graphs: bool | str | None,
    sizes: Sequence[tuple[int, int]] = SIZES[:1] * 2,
    between: Between = lambda engine: None,
    tracing: bool = False,
    recorder: Any = None,
    feature: Feature | None = None,
) -> Images:
    """A call for each of `sizes`; on every rank `between` runs before the second."""
    parsed = Plan.parse(plan)
    found, stand_in = (feature or Feature()).built(name), StandIn(parsed.world_size)
    prepare = (feature or Feature()).prepare  # each, since hooks of a copy would be on the modules of the original
    pipes = [prepare(deepcopy(found.pipe)) for _ in range(parsed.world_size)]
    monkeypatch.setattr(runner, "silence_libraries", lambda: None)
    monkeypatch.setattr(installed_graphs, "recorder_for", recorder or (lambda *_, **__: TapeRecorder(stand_in.rank)))
    monkeypatch.setattr(installed_graphs, "has_graphs", lambda kind: True)

    def on_rank(transport: TorchTransport) -> list[Any]:
        engine = PipelineRunner(ThreadContext(transport.rank, parsed.world_size))  # type: ignore[arg-type]
        engine._connection.transport = transport
        engine.adopt(pipes[transport.rank])
        options = CallOptions(plan=parsed, verify=False, quiet=True, graphs=graphs, tracing=tracing)
        results = []
        for number, (height, width) in enumerate(sizes):
            if number == 1:
                between(engine)
            given = {} if feature is None else feature.of_call(number)
            results.append(engine.generate(_arguments(found, height, width) | given, options))
        engine.restore()
        return results

    by_rank = stand_in.run(on_rank)
    for each in by_rank:
        if isinstance(each, BaseException):
            raise each
    assert stand_in.faults == []
    images = [_values(result.output).tobytes() for result in by_rank[0]]
    return Images(images, [[result.figures[0].replayed_calls for result in results] for results in by_rank])


def _values(output: Any) -> Any:
    """Images or frames, as numbers; of modular pipelines without others beside them."""
    return np.asarray(next(iter(output.values())) if hasattr(output, "values") else output)


def _arguments(found: tiny.Tiny, height: int, width: int) -> dict[str, Any]:
    given = {"num_inference_steps": STEPS, "output_type": "np", "height": height, "width": width}
    return found.call_kwargs | given | {"generator": torch.Generator().manual_seed(3)}


@pytest.mark.breadth
@pytest.mark.parametrize("plan", PLANS[:2])
@pytest.mark.parametrize("name", ["sdxl", "flux"])
def test_images_are_those_without_graphs(monkeypatch: pytest.MonkeyPatch, name: str, plan: str) -> None:
    wanted = generated(monkeypatch, name, plan, graphs=False)
    found = generated(monkeypatch, name, plan, graphs=True)
    assert found.images == wanted.images
    assert {sum(each) for each in wanted.replays} == {0}
    calls = CALLS_OF_A_STEP.get(name, 1)
    steady, kinds = (STEPS - 1, 1) if "strategy" not in plan else (STEPS - 2, calls)  # stale values are of one branch
    assert [list(each) for each in found.replays] == [[steady * calls - kinds, steady * calls]] * len(found.replays)


@pytest.mark.parametrize(
    ("name", "plan"),
    first_of(
        [("sdxl", "cfg=2"), ("flux", "patch=1"), ("sd3", "cfg=2"), ("qwen", "cfg=2"), ("sdxl", "patch=1")],
        ("sdxl", "patch=1"),
    ),
)
def test_calls_of_one_rank_are_replayed(monkeypatch: pytest.MonkeyPatch, name: str, plan: str) -> None:
    """Whole networks, with nothing to exchange in a call: on one device, or with guidance or prompts on several."""
    wanted = generated(monkeypatch, name, plan, graphs=False)
    found = generated(monkeypatch, name, plan, graphs=True)
    assert found.images == wanted.images
    calls = CALLS_OF_A_STEP.get(name, 1) if plan == "patch=1" else 1
    steady = (STEPS - 1) * calls
    assert [list(each) for each in found.replays] == [[steady - 1, steady]] * Plan.parse(plan).world_size


@pytest.mark.breadth
def test_a_change_ends_the_graphs_of_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    for change in (changed_attention, moved):
        found = generated(monkeypatch, "sdxl", "patch=1", graphs=True, between=change)
        assert found.images == generated(monkeypatch, "sdxl", "patch=1", graphs=False, between=change).images
        assert [list(each) for each in found.replays] == [[STEPS - 2, STEPS - 2]], "captured anew"


def test_a_denoiser_that_is_compiled_as_a_whole_has_no_graphs_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installed_graphs, "has_graphs", lambda kind: True)
    pipe = tiny.build("sdxl").pipe

    def needs(graphs: bool | str, patch: int = 1) -> bool:
        return needs_hooks(pipe, CallOptions(plan=Plan(patch=patch), graphs=graphs), torch.device("cuda", 0))

    assert needs("auto")
    assert not needs("auto", patch=2), "which has hooks anyhow"
    assert not needs(False)
    pipe.unet.compile()
    assert not needs("auto")
    with pytest.raises(UnsupportedModel, match="is compiled as a whole"):
        needs(True)


def test_without_a_choice_steps_of_several_devices_are_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """One device runs the plain pipeline."""
    found = generated(monkeypatch, "sdxl", "cfg=2", graphs=None)
    assert [list(each) for each in found.replays] == [[STEPS - 2, STEPS - 1]] * 2
    found = generated(monkeypatch, "sdxl", "patch=1", graphs=None)
    assert [list(each) for each in found.replays] == [[0, 0]]


def changed_attention(engine: PipelineRunner) -> None:
    engine.apply("unet.set_attn_processor", (AttnProcessor2_0(),), {})


@pytest.mark.breadth
def test_a_method_of_the_network_ends_its_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    found = generated(monkeypatch, "sdxl", DISPLACED, graphs=True, between=changed_attention)
    assert found.images == generated(monkeypatch, "sdxl", DISPLACED, graphs=False).images
    assert [list(each) for each in found.replays] == [[STEPS - 3, STEPS - 3]] * 2, "captured anew"


def scaled(engine: PipelineRunner) -> None:
    """Weights in place: a graph reads them where they lie."""
    for x in engine.pipe.unet.parameters():
        x.data.mul_(0.9)


def moved(engine: PipelineRunner) -> None:
    """Weights in other memory, without a word to the pipeline."""
    scaled(engine)
    for x in engine.pipe.unet.parameters():
        x.data = x.data.clone()


@pytest.mark.breadth
@pytest.mark.parametrize(("change", "kept"), [(scaled, True), (moved, False)])
def test_weights_that_move_end_graphs(monkeypatch: pytest.MonkeyPatch, change: Between, kept: bool) -> None:
    found = generated(monkeypatch, "sdxl", DISPLACED, graphs=True, between=change)
    wanted = generated(monkeypatch, "sdxl", DISPLACED, graphs=False, between=change)
    assert found.images == wanted.images
    assert wanted.images[0] != wanted.images[1], "the change is one"
    assert [list(each) for each in found.replays] == [[STEPS - 3, STEPS - 2 if kept else STEPS - 3]] * 2


@pytest.mark.breadth
def test_another_size_has_graphs_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = (SIZES[0], SIZES[1], SIZES[0])
    found = generated(monkeypatch, "sdxl", "patch=2", graphs=True, sizes=sizes)
    assert found.images == generated(monkeypatch, "sdxl", "patch=2", graphs=False, sizes=sizes).images
    assert found.images[0] == found.images[2]


@pytest.mark.breadth
@pytest.mark.parametrize(
    ("name", "strategy", "sizes"),
    [
        ("sdxl", "displaced", ((64, 64), (64, 96))),
        ("flux", "fresh-edges", ((64, 64), (64, 96))),
        ("sdxl", "fresh-edges", ((96, 64), (64, 96))),
    ],
)
def test_images_of_two_sizes_in_turn_keep_their_graphs_and_stale_values(
    monkeypatch: pytest.MonkeyPatch, name: str, strategy: str, sizes: Sequence[tuple[int, int]]
) -> None:
    plan, sizes = f"patch=2,strategy={strategy}:warmup_steps=1", (*sizes, sizes[0])
    found = generated(monkeypatch, name, plan, graphs=True, sizes=sizes)
    assert found.images == generated(monkeypatch, name, plan, graphs=False, sizes=sizes).images
    assert found.images[0] == found.images[2], "no value of another image is used"
    calls = CALLS_OF_A_STEP.get(name, 1)
    first, later = calls * (STEPS - 3), calls * (STEPS - 2)
    assert [list(each) for each in found.replays] == [[first, first, later]] * 2


@pytest.mark.breadth
def test_tall_and_wide_images_in_turn_keep_their_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """UNets are divided by rows or by columns, with exchange points of each."""
    sizes = ((96, 64), (64, 96)) * 2
    found = generated(monkeypatch, "sdxl", "patch=2", graphs=True, sizes=sizes)
    assert found.images == generated(monkeypatch, "sdxl", "patch=2", graphs=False, sizes=sizes).images
    assert [list(each) for each in found.replays] == [[STEPS - 2, STEPS - 2, STEPS - 1, STEPS - 1]] * 2


@pytest.mark.breadth
def test_guidance_on_other_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    found = generated(monkeypatch, "sdxl", PLANS[2], graphs=True)
    assert found.images == generated(monkeypatch, "sdxl", PLANS[2], graphs=False).images
    assert [list(each) for each in found.replays] == [[STEPS - 3, STEPS - 2]] * 4


# --- features -------------------------------------------------------------------------------------------------------


def adapted(pipe: Any) -> Any:
    """Two LoRAs of the UNet, the first one at work."""
    for number, name in enumerate("ab"):
        pipe.unet.add_adapter(LoraConfig(r=2, target_modules=["to_q", "to_v"], init_lora_weights=False), name)
        generator = torch.Generator().manual_seed(number)
        for path, x in pipe.unet.named_parameters():
            if f".{name}." in path:
                x.data.copy_(0.1 * torch.randn(x.shape, generator=generator))
    pipe.unet.set_adapters(["a"], [1.0])
    pipe.unet.eval().requires_grad_(False)
    return pipe


def perturbed(pipe: Any) -> Any:
    found = AutoPipelineForText2Image.from_pipe(pipe, enable_pag=True)
    found.set_progress_bar_config(disable=True)
    return found


def after_each_step(change: Callable[[Any, int], dict[str, Any] | None]) -> Callable[[int], dict[str, Any]]:
    """A callback that changes the pipeline, and what it returns of tensors, after each step."""

    def callback(pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        return change(pipe, step) or tensors

    return lambda number: {"callback_on_step_end": callback, "num_inference_steps": 6}


def with_other_adapters(pipe: Any, step: int) -> None:
    pipe.unet.set_adapters(["a"], [1.0 if step < 2 else 0.25])


def with_freeu(pipe: Any, step: int) -> None:
    if step == 2:
        pipe.enable_freeu(0.9, 0.2, 1.4, 1.6)
    elif step == 4:
        pipe.disable_freeu()


def with_other_processors(pipe: Any, step: int) -> None:
    pipe.unet.set_attn_processor(AttnProcessor2_0() if step < 2 else AttnProcessor())


def seeing_less(engine: PipelineRunner) -> None:
    """Factors of IP-Adapters, past the pipeline."""
    for module in engine.pipe.unet.modules():
        if hasattr(getattr(module, "processor", None), "scale"):
            module.processor.scale = [0.3, 0.1]


def cached(engine: PipelineRunner) -> None:
    engine.apply("transformer.enable_cache", (FirstBlockCacheConfig(threshold=0.1),), {})


def of_lora(number: int) -> dict[str, Any]:
    return {"cross_attention_kwargs": {"scale": (0.3, 0.7)[number]}}


def controlled(number: int) -> dict[str, Any]:
    return {"control_guidance_end": 0.5}


FEATURES: dict[str, tuple[str, str, Feature]] = {
    "a LoRA's scale in each call": ("sd", "patch=2", Feature(adapted, of_lora)),
    "adapters in a callback": ("sd", "cfg=2", Feature(adapted, after_each_step(with_other_adapters))),
    "FreeU in a callback": ("sd", "cfg=2", Feature(of_call=after_each_step(with_freeu))),
    "processors in a callback": ("sd", "cfg=2", Feature(of_call=after_each_step(with_other_processors))),
    "scales of IP-Adapters": ("sd_ip_masks", "patch=2", Feature(between=seeing_less)),
    "a ControlNet in some steps": (
        "sd_controlnet",
        DISPLACED,
        Feature(of_call=lambda _: {"control_guidance_end": 0.5}),
    ),
    "a T2I-Adapter": ("sd_t2i", DISPLACED, Feature()),
    "perturbed attention": ("sd", "patch=2", Feature(perturbed, lambda _: {"pag_scale": 2.0})),
    "perturbed attention on its ranks": ("sd", "cfg=3", Feature(perturbed, lambda _: {"pag_scale": 2.0})),
    "layers skipped by guidance": ("sd3", "cfg=2", Feature(of_call=lambda _: {"skip_guidance_layers": [0]})),
    "a step cache": ("flux", "patch=2", Feature(between=cached)),
}


@pytest.mark.breadth
@pytest.mark.parametrize("which", FEATURES)
def test_images_with_a_feature_are_those_without_graphs(monkeypatch: pytest.MonkeyPatch, which: str) -> None:
    name, plan, feature = FEATURES[which]
    wanted = generated(monkeypatch, name, plan, graphs=False, feature=feature, between=feature.between)
    found = generated(monkeypatch, name, plan, graphs="auto", feature=feature, between=feature.between)
    assert found.images == wanted.images
    assert found.replays[0][0] > 0
    assert (found.replays[0][1] > 0) == (which != "a step cache"), "its blocks are skipped by hooks"


@pytest.mark.breadth
def test_a_controlnet_in_bands_has_graphs_too(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = generated(monkeypatch, "sd_controlnet", "patch=2", graphs=False)
    found = generated(monkeypatch, "sd_controlnet", "patch=2", graphs=True)
    assert found.images == wanted.images
    assert [list(each) for each in found.replays] == [[2 * (STEPS - 2), 2 * (STEPS - 1)]] * 2  # of both networks


@pytest.mark.breadth
def test_a_traced_call_has_every_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    found = generated(monkeypatch, "sdxl", "patch=2", graphs=True, sizes=SIZES[:1], tracing=True)
    assert [list(each) for each in found.replays] == [[0]] * 2


@pytest.mark.breadth
def test_auto_changes_nothing_where_no_device_has_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    found = generated(monkeypatch, "sdxl", "patch=2", graphs="auto", sizes=SIZES[:1], recorder=recorder_for)
    assert [list(each) for each in found.replays] == [[0]] * 2


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ("patch=2", "devices of type 'cpu' cannot capture steps as graphs"),
        ("cfg=2", "devices of type 'cpu' cannot capture steps as graphs"),
        ("tensor=2", "denoisers whose features or blocks are divided between ranks are not captured"),
        ("patch=2,weights=sharded", "weights=sharded brings weights of blocks into other memory in each step"),
    ],
)
def test_a_plan_that_cannot_is_refused_with_the_way_out(
    monkeypatch: pytest.MonkeyPatch, plan: str, message: str
) -> None:
    with pytest.raises(PlanError, match=f"graphs=True: {message}.*: use graphs='auto', which captures where it can"):
        generated(monkeypatch, "sdxl", plan, graphs=True, recorder=recorder_for)


@pytest.mark.parametrize(
    ("graphs", "message"),
    [
        (True, "graphs are captured on CUDA devices, and this pipeline is on cpu, cpu: use graphs='auto'"),
        ("always", "graphs='always': use True, False or 'auto'"),
        (1, "graphs=1: use True, False or 'auto'"),
    ],
)
def test_the_option_is_checked_before_a_worker_starts(graphs: object, message: str) -> None:
    start: dict[str, Any] = {"deadline": 60.0, "start_timeout": 60.0, "start_method": "auto"}
    with pytest.raises(PlanError, match=message):
        check_request("cpu:2", "auto", **start, verify=True, vae="auto", graphs=graphs)
    assert check_request("cpu:2", "auto", **start, verify=True, vae="auto", graphs="auto").graphs == "auto"
