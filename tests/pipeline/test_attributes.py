"""What people set on a pipeline acts on all ranks; what cannot is refused by name."""

from __future__ import annotations

import copy
import operator
import pickle
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers import (
    DDIMScheduler,
    DiffusionPipeline,
    DPMSolverMultistepScheduler,
    EulerAncestralDiscreteScheduler,
    StableDiffusionXLImg2ImgPipeline,
)
from diffusers.hooks import PyramidAttentionBroadcastConfig

from patchpar import ParallelPipeline, PlanError, UnsupportedModel
from patchpar.pipeline.component_proxy import ComponentProxy
from patchpar.pipeline.description import set_if_described
from tests.breadth import first_of
from tests.tiny import build

from .conftest import EXACT, QUICK, Hold, generator, relative_error

CALL = {**QUICK, "output_type": "latent"}
PLANS = ("cfg=2", "patch=2")


@pytest.mark.parametrize("plan", first_of(PLANS))
def test_schedulers(parallel: ParallelPipeline, plain: Any, plan: str) -> None:
    parallel.plan = plan
    before = plain.scheduler
    want_before = plain(**CALL, generator=generator())
    try:
        for kind in (DDIMScheduler, DPMSolverMultistepScheduler, EulerAncestralDiscreteScheduler):
            for pipe in (parallel, plain):
                pipe.scheduler = kind.from_config(pipe.scheduler.config)
            assert type(parallel.scheduler) is kind
            want = plain(**CALL, generator=generator())
            assert relative_error(parallel(**CALL, generator=generator()), want) <= EXACT
            assert relative_error(want_before, want) > 100 * EXACT
    finally:
        plain.scheduler = parallel.scheduler = before


@pytest.fixture
def own_plain() -> Iterator[Any]:
    """A plain pipeline that a test may change."""
    return build("sdxl").pipe


@pytest.mark.breadth  # LoRAs of jobs are in test_job_adapters, those of one network in exact/test_adapters
@pytest.mark.parametrize("plan", PLANS)
def test_loras(reloaded: ParallelPipeline, own_plain: Any, loras: Path, plan: str) -> None:
    parallel = reloaded
    parallel.plan = plan
    pipes = (parallel, own_plain)

    def both() -> tuple[Any, float]:
        want = own_plain(**CALL, generator=generator())
        return want, relative_error(parallel(**CALL, generator=generator()), want)

    untouched, error = both()
    assert error <= EXACT
    try:
        for pipe in pipes:
            for name in ("ink", "snow"):
                assert pipe.load_lora_weights(loras, weight_name=f"{name}.safetensors", adapter_name=name) is None
            pipe.set_adapters(["ink", "snow"], [0.7, 0.4])
        assert parallel.get_active_adapters() == ["ink", "snow"]
        mixed, error = both()
        assert error <= EXACT
        assert relative_error(untouched, mixed) > 100 * EXACT
        for pipe in pipes:
            pipe.set_adapters("snow")
            pipe.fuse_lora()
        fused, error = both()
        assert error <= EXACT
        assert relative_error(mixed, fused) > 100 * EXACT
        for pipe in pipes:
            pipe.unfuse_lora()
    finally:
        for pipe in pipes:
            pipe.unload_lora_weights()
    again, error = both()
    assert error <= EXACT
    assert relative_error(again, untouched) <= EXACT
    assert parallel.get_active_adapters() == []


@pytest.mark.parametrize("plan", first_of(("cfg=2", "cfg=2,encoders=one"), "cfg=2,encoders=one"))
def test_textual_inversions_of_two_encoders(reloaded: ParallelPipeline, sdxl_folder: Path, plan: str) -> None:
    """A part of the pipeline that is an argument of its method is, on each rank, the part of that rank."""
    parallel, own_plain = reloaded, DiffusionPipeline.from_pretrained(sdxl_folder)
    own_plain.set_progress_bar_config(disable=True)
    parallel.plan, call = plan, CALL | {"prompt": "a <fox> in the snow"}
    pipes, noise = (parallel, own_plain), torch.Generator().manual_seed(1)

    def both() -> tuple[Any, float]:
        want = own_plain(**call, generator=generator())
        return want, relative_error(parallel(**call, generator=generator()), want)

    untouched, _ = both()
    for number in ("", "_2"):
        encoder, tokenizer = f"text_encoder{number}", f"tokenizer{number}"
        vectors = torch.randn(2, getattr(own_plain, encoder).config.hidden_size, generator=noise)
        for pipe in pipes:
            parts = {"text_encoder": getattr(pipe, encoder), "tokenizer": getattr(pipe, tokenizer)}
            pipe.load_textual_inversion(vectors, token="<fox>", **parts)
    want, error = both()
    assert error <= EXACT
    assert relative_error(untouched, want) > 100 * EXACT
    for pipe in pipes:
        pipe.unload_textual_inversion()
        pipe.unload_textual_inversion(text_encoder=pipe.text_encoder_2, tokenizer=pipe.tokenizer_2)
    again, error = both()
    assert error <= EXACT
    assert relative_error(again, untouched) <= EXACT


def test_a_tokenizer_that_was_changed_is_no_part_of_the_pipeline(parallel: ParallelPipeline) -> None:
    tokenizer, copies = parallel.tokenizer_2, parallel._state.copies
    assert copies.name_of(tokenizer) == "tokenizer_2"
    tokenizer.add_tokens(["<fox>"])
    assert copies.name_of(tokenizer) is None
    parallel.tokenizer_2  # noqa: B018  the next copy is the latest


FREEU = {"s1": 0.9, "s2": 0.2, "b1": 1.5, "b2": 1.6}


@pytest.mark.parametrize("plan", first_of(PLANS, "patch=2"))
def test_freeu(parallel: ParallelPipeline, own_plain: Any, plan: str) -> None:
    parallel.plan = plan
    for pipe in (parallel, own_plain):
        pipe.enable_freeu(**FREEU)
    try:
        want = own_plain(**CALL, generator=generator())
        assert relative_error(parallel(**CALL, generator=generator()), want) <= EXACT
    finally:
        parallel.disable_freeu()
    assert relative_error(parallel(**CALL, generator=generator()), want) > 100 * EXACT


def test_freeu_switched_on_before(hold: Hold, parallel: ParallelPipeline, own_plain: Any) -> None:
    """Where the verdict on the same network without it is known."""
    parallel.plan = "patch=2"
    untouched = own_plain(**CALL, generator=generator())
    assert relative_error(parallel(**CALL, generator=generator()), untouched) <= EXACT
    own_plain.enable_freeu(**FREEU)
    want = own_plain(**CALL, generator=generator())
    assert relative_error(untouched, want) > 100 * EXACT
    with hold(own_plain) as changed:
        changed.plan = "patch=2"
        assert relative_error(changed(**CALL, generator=generator()), want) <= EXACT


@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [
        ("to", ("cuda",), "devices="),
        ("enable_model_cpu_offload", (), "its own device"),
        ("enable_sequential_cpu_offload", (), "its own device"),
        ("enable_group_offload", (), "of a network"),
        ("save_pretrained", ("/nowhere",), "before parallelising"),
        ("push_to_hub", ("x/y",), "before parallelising"),
        ("from_pipe", (None,), "another pipeline"),
    ],
)
def test_methods_that_are_refused(parallel: ParallelPipeline, name: str, arguments: Any, words: str) -> None:
    with pytest.raises(UnsupportedModel, match=f"{name} is not for several devices.*{words}"):
        getattr(parallel, name)(*arguments)


@pytest.mark.parametrize("name", ["components", "_get_add_time_ids", "unet.conv_in", "vae.encoder"])
def test_networks_stay_in_the_workers(parallel: ParallelPipeline, name: str) -> None:
    with pytest.raises(UnsupportedModel, match=rf"pipe\.{name} .*exists in the workers only.*pipe\.vae\.enable_tiling"):
        operator.attrgetter(name)(parallel)


def test_another_pipeline_of_the_same_networks(parallel: ParallelPipeline) -> None:
    with pytest.raises(UnsupportedModel, match=r"other pipelines of the same networks \(from_pipe\), before"):
        StableDiffusionXLImg2ImgPipeline.from_pipe(parallel)


def test_methods_of_a_network_act_on_all_ranks(parallel: ParallelPipeline, own_plain: Any) -> None:
    tall = {**QUICK, "num_inference_steps": 1, "output_type": "np", "height": 256}  # more than one tile
    parallel.plan = "patch=2"
    before = parallel(**tall, generator=generator())
    for pipe in (parallel, own_plain):
        assert pipe.vae.enable_tiling() is None
        pipe.vae.tile_sample_min_size = 64
        pipe.vae.tile_latent_min_size = 8
        pipe.unet.set_attention_backend("native")
    try:
        want = own_plain(**tall, generator=generator())
        assert relative_error(parallel(**tall, generator=generator()), want) <= 10 * EXACT
        assert relative_error(before, want) > 100 * EXACT  # tiles are seen
    finally:
        parallel.vae.disable_tiling()
    assert relative_error(parallel(**tall, generator=generator()), before) == 0


def test_a_network_as_its_caller_holds_it(parallel: ParallelPipeline, plain: Any) -> None:
    assert repr(parallel.unet) == "<pipe.unet, a UNet2DConditionModel in the workers>"
    assert parallel.unet.config.cross_attention_dim == plain.unet.config.cross_attention_dim
    assert parallel.unet.dtype == torch.float32
    assert parallel.unet.num_parameters() == plain.unet.num_parameters()
    assert parallel.unet.eval() is not plain.unet
    assert "enable_tiling" in dir(parallel.vae)
    assert not hasattr(parallel.vae, "enable_levitation")
    with pytest.raises(UnsupportedModel, match=r"pipe\.vae\.to is not for networks in workers: pass devices="):
        parallel.vae.to("cuda")
    with pytest.raises(UnsupportedModel, match="called by the pipeline only"):
        parallel.unet(torch.zeros(1))


def test_attributes_that_can_be_read(parallel: ParallelPipeline, plain: Any) -> None:
    assert parallel.vae_scale_factor == plain.vae_scale_factor == 8
    assert parallel.scheduler.config == plain.scheduler.config
    assert parallel.config["unet"] == plain.config["unet"] == ("diffusers", "UNet2DConditionModel")
    assert parallel.tokenizer("a red house").input_ids == plain.tokenizer("a red house").input_ids
    assert parallel.device == torch.device("cpu")
    embeddings = parallel.encode_prompt("a red house", device="cpu")
    assert all(
        torch.equal(a, b) for a, b in zip(embeddings, plain.encode_prompt("a red house", device="cpu"), strict=True)
    )


def test_attributes_behave_as_in_python(parallel: ParallelPipeline) -> None:
    with pytest.raises(AttributeError, match="no attribute 'schedular'"):
        parallel.schedular  # noqa: B018
    assert not hasattr(parallel, "schedular")
    assert not hasattr(parallel, "_repr_latex_")
    assert hasattr(parallel, "load_lora_weights")
    assert hasattr(parallel, "vae_scale_factor")
    parallel.my_own = 3
    assert parallel.my_own == 3
    names = dir(parallel)
    assert {"load_lora_weights", "set_adapters", "encode_prompt", "restore", "close", "plan"} <= set(names)


def test_a_notebook_shows_the_plan_and_the_latest_call(
    parallel: ParallelPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    parallel.plan = "patch=2"
    with monkeypatch.context() as before:
        before.setattr(parallel._state, "last_run", None)
        text = parallel._repr_html_()
    assert "ParallelPipeline of StableDiffusionXLPipeline on 2 CPU workers" in text
    assert "rank 0 on cpu" in text
    assert "rank 1 on cpu" in text
    parallel(**CALL, generator=generator())
    assert parallel.last_run is not None
    assert parallel._repr_html_() == text + parallel.last_run._repr_html_()


def test_repr(parallel: ParallelPipeline) -> None:
    parallel.plan = "patch=2"
    devices, plan = r"2 CPU workers sharing \d+ cores?", r"plan patch=2\S*: as requested"
    assert re.fullmatch(f"<ParallelPipeline of StableDiffusionXLPipeline on {devices}; {plan}>", repr(parallel))
    assert "plan patch=2" in parallel.explain()


def test_a_method_that_fails_raises_as_it_does_in_diffusers(parallel: ParallelPipeline, plain: Any) -> None:
    with pytest.raises(ValueError, match="ink"):
        plain.set_adapters("ink")
    with pytest.raises(ValueError, match="ink"):
        parallel.set_adapters("ink")
    assert relative_error(parallel(**CALL, generator=generator()), plain(**CALL, generator=generator())) <= EXACT


def test_a_value_that_cannot_travel(parallel: ParallelPipeline) -> None:
    with pytest.raises(PlanError, match=r"^pipe\.scheduler \(a generator\) cannot be sent to worker processes"):
        parallel.scheduler = (item for item in ())


class NoScheduler:
    """Has no config, which a description is made of."""


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("scheduler", NoScheduler(), r"^pipe\.scheduler cannot be <.*NoScheduler.*config'\), and is what it was"),
        ("unet", 4, r"^pipe\.unet cannot be 4, which is no torch module: set a network"),
    ],
)
def test_what_cannot_be_a_part_leaves_the_pipeline_as_it_was(
    parallel: ParallelPipeline, plain: Any, name: str, value: object, says: str
) -> None:
    with pytest.raises(PlanError, match=says):
        setattr(parallel, name, value)
    assert relative_error(parallel(**CALL, generator=generator()), plain(**CALL, generator=generator())) <= EXACT


def test_an_attribute_that_is_refused_is_set_back_or_removed() -> None:
    pipe = SimpleNamespace(kept="as it was")
    for name in ("kept", "another"):
        with (
            pytest.raises(PlanError, match=rf"pipe\.{name} cannot be 4 \(KeyError"),
            set_if_described(pipe, name, 4, name),
        ):
            raise KeyError(name)
    assert vars(pipe) == {"kept": "as it was"}


def test_what_holds_a_parallel_pipeline_cannot_travel(parallel: ParallelPipeline) -> None:
    """Nor can it be copied; in the words of neither is there a lock."""
    says, way_out = "a ParallelPipeline has ranks of its own", r"before ParallelPipeline\(pipe\)"
    refused = f"cannot be sent to worker processes: {says}.*{way_out}"
    for copied in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match=says):
            copied(parallel)
    with pytest.raises(PlanError, match=refused):
        parallel.asks_for_the_time = lambda: parallel.current_timestep


def test_what_stands_for_a_network_cannot_be_copied_or_set(parallel: ParallelPipeline) -> None:
    for copied in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match=r"<pipe\.unet, .* in the workers> stands for a network"):
            copied(parallel.unet)
    for path in ("unet", "vae.encoder"):
        owner, _, name = path.rpartition(".")
        with pytest.raises(UnsupportedModel, match=rf"pipe\.{path} cannot be <pipe\.unet, .*: set a network that"):
            setattr(getattr(parallel, owner) if owner else parallel, name, parallel.unet)
    other = ComponentProxy("unet", parallel.description.networks["unet"], parallel._state.ask, print)
    with pytest.raises(PlanError, match=r"cannot be sent to worker processes: <pipe\.unet, .* stands for a network"):
        parallel.register_modules(unet=other)  # of another pipeline
    parallel.register_modules(unet=parallel.unet)  # changes nothing
    assert parallel.unet.config.in_channels == other.config.in_channels


@pytest.mark.parametrize("path", ["unet", "vae.decode"])
def test_compiled_in_this_process(parallel: ParallelPipeline, path: str) -> None:
    """As in diffusers' documentation, pipe.unet = torch.compile(pipe.unet)."""
    owner, _, name = path.rpartition(".")
    network = getattr(parallel, owner) if owner else parallel
    with pytest.raises(UnsupportedModel, match=rf"pipe\.{path} .*torch\.compile.*compile_repeated_blocks"):
        setattr(network, name, torch.compile(getattr(network, name), backend="eager"))


def test_parts_that_a_pipeline_does_not_have(parallel: ParallelPipeline, plain: Any) -> None:
    """diffusers registers them, and cannot list the pipeline's components afterwards."""
    with pytest.raises(UnsupportedModel, match="XLPipeline has no part safety_checker to register: it has feat"):
        parallel.register_modules(safety_checker=None)
    with pytest.raises(ValueError, match="ink"):
        parallel.set_adapters("ink")
    parallel.register_modules(scheduler=plain.scheduler)


def test_a_cache_asks_for_the_timestep_of_the_ranks_own_pipeline(hold: Hold) -> None:
    """As diffusers documents it: its function refers to the pipeline, which goes to the ranks with it."""
    tiny = build("cogvideox")
    pipe, call = tiny.pipe, {**tiny.call_kwargs, "num_inference_steps": 6, "output_type": "latent"}
    untouched = pipe(**call, generator=generator())
    pipe.transformer.enable_cache(
        PyramidAttentionBroadcastConfig(
            spatial_attention_block_skip_range=2,
            spatial_attention_timestep_skip_range=(-1, 1001),
            current_timestep_callback=lambda: pipe.current_timestep,
        )
    )
    want = pipe(**call, generator=generator())
    assert relative_error(untouched, want) > 100 * EXACT
    with hold(pipe) as parallel:
        parallel.plan = "cfg=2"
        assert relative_error(parallel(**call, generator=generator()), want) <= EXACT


def test_a_change_of_what_was_read_is_no_change_of_the_ranks(
    parallel: ParallelPipeline, caplog: pytest.LogCaptureFixture
) -> None:
    """Said before the next call, once; not of what was set, or only read."""
    before = parallel.scheduler
    try:
        parallel(**CALL, generator=generator())
        assert not caplog.messages
        parallel.scheduler.register_to_config(prediction_type="v_prediction")
        for _ in range(2):
            parallel(**CALL, generator=generator())
        (message,) = caplog.messages
        assert message.startswith("pipe.scheduler was changed, but what is read is a copy of it")
        changed = parallel.scheduler
        assert changed.config.prediction_type == before.config.prediction_type
        changed.register_to_config(prediction_type="v_prediction")
        parallel.scheduler = changed
        caplog.clear()
        parallel(**CALL, generator=generator())
        assert not caplog.messages
    finally:
        parallel.scheduler = before
