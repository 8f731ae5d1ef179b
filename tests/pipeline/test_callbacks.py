"""Progress and callback_on_step_end reach the caller, who may change latents, attributes, and stop the run."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers import AceStepPipeline, DDIMScheduler, KandinskyV22CombinedPipeline
from diffusers.callbacks import MultiPipelineCallbacks, PipelineCallback, SDXLCFGCutoffCallback
from diffusers.models.attention_processor import AttnProcessor2_0

from patchpar import ParallelPipeline, UnsupportedModel
from patchpar.errors import CallCancelled, PlanError
from patchpar.models.call_parameters import parameters_of
from patchpar.pipeline.step_callbacks import with_callback_on_step_end
from tests.breadth import first_of
from tests.tiny import build
from tests.tiny.adapted_pipelines import SEEN, image_weights

from .callbacks import Darken, Halved
from .conftest import EXACT, QUICK, Hold, generator, relative_error

CALL = {**QUICK, "num_inference_steps": 4, "output_type": "latent"}


def compare(parallel: ParallelPipeline, plain: Any, callback: Callable[[], Any], **more: Any) -> float:
    """Relative error of a call with a fresh callback each, and that the callback matters."""
    call = CALL | more
    got = parallel(**call, generator=generator(), callback_on_step_end=callback())
    want = plain(**call, generator=generator(), callback_on_step_end=callback())
    untouched = plain(**call, generator=generator())
    assert relative_error(untouched, want) > 10 * EXACT
    return relative_error(got, want)


@pytest.mark.parametrize("plan", first_of(["cfg=2", "patch=2"], "patch=2"))
def test_a_callback_changes_latents(parallel: ParallelPipeline, plain: Any, plan: str) -> None:
    def callback() -> Any:
        def darken(pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
            return {"latents": tensors["latents"] * 0.8} if step % 2 else tensors

        return darken

    parallel.plan = plan
    assert compare(parallel, plain, callback) <= EXACT


@pytest.mark.parametrize("answers", [True, False])
def test_a_callback_changes_latents_in_place(parallel: ParallelPipeline, plain: Any, answers: bool) -> None:
    def callback() -> Any:
        def darken(pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
            tensors["latents"].mul_(0.8)
            return tensors if answers else {}

        return darken

    with torch.inference_mode(answers):
        assert compare(parallel, plain, callback) <= EXACT


def brighten(pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
    return {"latents": tensors["latents"] * (1 + 0.2 * torch.arange(len(tensors["latents"])).view(-1, 1, 1, 1))}


def test_a_callback_gets_the_latents_of_all_prompts(parallel: ParallelPipeline, plain: Any) -> None:
    parallel.plan = "auto"
    prompts = ["a small red house", "a blue boat"]
    assert compare(parallel, plain, lambda: brighten, prompt=prompts) <= EXACT
    assert "2 prompts stay in one batch: callback_on_step_end" in parallel.explain()


def test_a_callback_does_not_change_the_latents_of_some_prompts(parallel: ParallelPipeline) -> None:
    """Each rank would go on with those of the first one."""
    parallel.plan = "data=2"
    call, seen = {**CALL, "prompt": ["a small red house", "a blue boat"]}, list[int]()

    def look(pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        seen.append(len(tensors["latents"]))
        return tensors

    parallel(**call, generator=generator(), callback_on_step_end=look)
    assert seen == [1] * 4
    with pytest.raises(PlanError, match=r"has changed latents, but with data=2"):
        parallel(**call, generator=generator(), callback_on_step_end=brighten)


def test_what_a_callback_sees(parallel: ParallelPipeline, plain: Any) -> None:
    wanted = ["latents", "prompt_embeds", "add_time_ids"]
    found = []
    for pipe in (parallel, plain):
        seen: list[Any] = []

        def look(pipe: Any, step: int, timestep: Any, tensors: dict[str, Any], seen: list[Any] = seen) -> Any:
            facts = (pipe.num_timesteps, pipe.guidance_scale, pipe.do_classifier_free_guidance, pipe.interrupt)
            seen.append((step, float(timestep), sorted(tensors), facts, tensors["latents"].clone()))
            return tensors

        pipe(
            **CALL,
            generator=generator(),
            callback_on_step_end=look,
            callback_on_step_end_tensor_inputs=wanted,
        )
        found.append(seen)
    ours, theirs = found
    assert [entry[:4] for entry in ours] == [entry[:4] for entry in theirs]
    assert all(torch.allclose(a[4], b[4], atol=1e-3) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("plan", first_of(["cfg=2", "patch=2"], "cfg=2"))
def test_a_callback_stops_the_run(parallel: ParallelPipeline, plain: Any, plan: str) -> None:
    steps: list[int] = []

    def callback() -> Any:
        def stop(pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
            steps.append(step)
            pipe._interrupt = step == 1
            return tensors

        return stop

    parallel.plan = plan
    assert compare(parallel, plain, callback) <= EXACT
    assert steps == [0, 1] * 2
    assert parallel.last_run is not None
    assert parallel.last_run.steps == 2
    want = plain(**CALL, generator=generator())
    assert relative_error(parallel(**CALL, generator=generator()), want) <= EXACT  # and the next one runs through


def test_another_thread_cannot_stop_the_run(parallel: ParallelPipeline) -> None:
    """It would wait for the end of the call, and have no effect."""
    refused = []

    def stop() -> None:
        with pytest.raises(PlanError, match="after the call that they are in: set it in its callback_on_step_end"):
            parallel._interrupt = True
        refused.append(True)

    def callback(pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        thread = threading.Thread(target=stop, daemon=True)
        thread.start()
        thread.join(20)  # it would wait for the call, which waits for this
        return tensors

    parallel(**CALL, generator=generator(), callback_on_step_end=callback)
    assert len(refused) == 4
    for value in (True, False):
        parallel._interrupt = value
        assert parallel._interrupt is value


def test_a_callback_reads_what_it_has_set(parallel: ParallelPipeline, plain: Any) -> None:
    """By the property of the pipeline, too, as in diffusers."""
    found = []
    for pipe in (parallel, plain):
        seen: list[Any] = []

        def change(pipe: Any, step: int, timestep: Any, tensors: dict[str, Any], seen: list[Any] = seen) -> Any:
            pipe._guidance_scale, pipe._interrupt = 3.0 + step, step == 1
            seen.append((pipe.guidance_scale, pipe.interrupt, pipe._interrupt))
            return tensors

        pipe(**CALL, generator=generator(), callback_on_step_end=change)
        found.append(seen)
    assert found[0] == found[1] == [(3.0, False, False), (4.0, True, True)]


def test_a_callback_turns_guidance_off(parallel: ParallelPipeline, plain: Any) -> None:
    """The way diffusers documents: it sets an attribute of the pipeline and passes half of the embeddings."""
    names = ["prompt_embeds", "add_text_embeds", "add_time_ids"]

    def callback() -> Any:
        def cut_off(pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
            if step == int(pipe.num_timesteps * 0.5):
                pipe._guidance_scale = 0.0
                return {name: tensor.chunk(2)[-1] for name, tensor in tensors.items()}
            return tensors

        return cut_off

    parallel.plan = "cfg=2"
    assert compare(parallel, plain, callback, callback_on_step_end_tensor_inputs=names) <= EXACT


def test_diffusers_own_callbacks(parallel: ParallelPipeline, plain: Any) -> None:
    assert compare(parallel, plain, lambda: SDXLCFGCutoffCallback(cutoff_step_ratio=0.5)) <= EXACT
    both = [Darken(), SDXLCFGCutoffCallback(cutoff_step_ratio=0.25)]
    assert compare(parallel, plain, lambda: MultiPipelineCallbacks(both)) <= EXACT


def test_a_callback_class_that_workers_cannot_import(parallel: ParallelPipeline, plain: Any) -> None:
    class Brighten(PipelineCallback):
        tensor_inputs = ["latents"]  # noqa: RUF012

        def callback_fn(self, pipeline: Any, step_index: int, timesteps: Any, callback_kwargs: Any) -> Any:
            return {**callback_kwargs, "latents": callback_kwargs["latents"] * 1.2}

    assert compare(parallel, plain, Brighten) <= EXACT


@pytest.mark.parametrize("plan", first_of(["cfg=2", "patch=2"], "patch=2"))
def test_the_only_callback_of_older_pipelines(hold: Hold, plan: str) -> None:
    """It gets step, timestep and latents, and may write to these; PixArt has no other."""
    tiny, found, seen = build("pixart"), [], list[tuple[int, float]]()
    call = {**tiny.call_kwargs, "num_inference_steps": 4, "output_type": "latent"}

    def darken(step: int, timestep: Any, latents: torch.Tensor) -> str:
        seen.append((step, float(timestep)))
        latents.mul_(0.8)
        return "is not read"

    untouched = tiny.pipe(**call, generator=generator())
    with hold(tiny.pipe) as parallel:
        parallel.plan = plan
        for pipe in (parallel, tiny.pipe):
            found.append(pipe(**call, generator=generator(), callback=darken, callback_steps=2))
        assert relative_error(parallel(**call, generator=generator(), callback_steps=1), untouched) <= EXACT
    assert relative_error(*found) <= EXACT
    assert relative_error(untouched, found[1]) > 10 * EXACT
    assert seen[:2] == seen[2:]
    assert [step for step, _ in seen] == [0, 2, 0, 2]


@pytest.mark.parametrize("kind", [AceStepPipeline, KandinskyV22CombinedPipeline])
def test_the_older_callback_beside_the_other_is_refused(kind: Any) -> None:
    """In the place of the other one it would be called in every step, and the other one not at all."""
    model: Any = SimpleNamespace(pipeline=kind.__name__, parameters=parameters_of(kind))
    with pytest.raises(PlanError, match=r"callback= is deprecated in diffusers .*: use callback_on_step_end="):
        with_callback_on_step_end(model, {"callback": print, "callback_steps": 2, "callback_on_step_end": print})
    given = {"callback": None, "callback_on_step_end": print}
    assert with_callback_on_step_end(model, given) == given


class Enough(Exception):
    """A callback ends its call."""


def test_an_exception_in_a_callback_is_the_callers_own(parallel: ParallelPipeline, plain: Any) -> None:
    def callback(pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        raise Enough(f"after step {step}")

    pids = parallel._executor.pids
    with pytest.raises(Enough, match="after step 0"):
        parallel(**CALL, generator=generator(), callback_on_step_end=callback)
    got, want = parallel(**CALL, generator=generator()), plain(**CALL, generator=generator())
    assert relative_error(got, want) <= EXACT
    assert parallel._executor.pids == pids


Callback = Callable[..., dict[str, Any]]


def at_step(wanted: int, do: Callable[[Any], object]) -> Callback:
    def callback(pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        if step == wanted:
            do(pipe)
        return tensors

    return callback


def _filter(pipe: Any) -> None:
    pipe.enable_freeu(s1=0.9, s2=0.2, b1=1.5, b2=1.6)


def _other_processors(pipe: Any) -> None:
    pipe.unet.set_attn_processor(Halved())


UNDONE = {
    _filter: lambda pipe: pipe.disable_freeu(),
    _other_processors: lambda pipe: pipe.unet.set_attn_processor(AttnProcessor2_0()),
}


@pytest.mark.parametrize(
    ("do", "plan"),
    first_of(
        [(do, plan) for do in UNDONE for plan in ("cfg=2", "patch=2", "patch=2,strategy=fresh-edges")],
        (_filter, "cfg=2"),  # bands, in test_faults: a callback switches the same filter on
    ),
)
def test_a_callback_calls_methods(parallel: ParallelPipeline, plain: Any, do: Any, plan: str) -> None:
    """All ranks do what it did when it has returned, and keep it after the call, as one process does."""
    parallel.plan = plan
    changed_as_in_one_process(parallel, plain, do, UNDONE[do])


@pytest.mark.parametrize("how", ["callback", "cancelled"])
def test_a_callback_changes_all_ranks_also_if_its_call_fails_later(parallel: ParallelPipeline, how: str) -> None:
    """Else ranks that have not worked on the call would go on without its changes, and images depend on the ranks."""
    jobs: list[Any] = []

    def callback(pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        if step == 0:
            pipe.vae.enable_tiling()
        elif how == "callback":
            pipe.vae.enable_slicing()  # which no rank is told of
            raise Enough("after the second step")
        else:
            jobs[0].cancel()
        return tensors

    call = {**CALL, "num_inference_steps": 4}
    try:
        jobs.append(parallel.submit(**call, plan="single", ranks=(1,), callback_on_step_end=callback))
        with pytest.raises(Enough if how == "callback" else CallCancelled):
            jobs[0].result(120)
        for name, wanted in (("vae.use_tiling", True), ("vae.use_slicing", False)):
            assert parallel._executor.call("get", name, everywhere=True) == [wanted] * 2
    finally:
        parallel.vae.disable_tiling()


def changed_as_in_one_process(
    parallel: ParallelPipeline, plain: Any, do: Callable[[Any], object], undo: Callable[[Any], object], **more: Any
) -> None:
    """What a callback does after the second step matters, and is exact: in that call, in the next, and once undone."""
    call = CALL | more
    untouched = plain(**call, generator=generator())
    before = parallel(**call, generator=generator())
    limit = EXACT if "fresh-edges" not in str(parallel.plan) else 1.5 * relative_error(before, untouched)
    try:
        got = parallel(**call, generator=generator(), callback_on_step_end=at_step(1, do))
        want = plain(**call, generator=generator(), callback_on_step_end=at_step(1, do))
        assert relative_error(untouched, want) > 100 * EXACT
        assert relative_error(got, want) <= limit
        again = relative_error(parallel(**call, generator=generator()), plain(**call, generator=generator()))
        assert again <= limit
    finally:
        for pipe in (parallel, plain):
            undo(pipe)
    assert relative_error(parallel(**call, generator=generator()), before) <= EXACT


@pytest.mark.parametrize("plan", first_of(["cfg=2", "patch=2"]))
def test_a_callback_sets_adapters(parallel: ParallelPipeline, plain: Any, loras: Path, plan: str) -> None:
    """Another LoRA from the third step on, and a second one beside it."""
    parallel.plan = plan
    try:
        for pipe in (parallel, plain):
            for name in ("ink", "snow"):
                pipe.load_lora_weights(loras, weight_name=f"{name}.safetensors", adapter_name=name)
        changed_as_in_one_process(
            parallel,
            plain,
            lambda pipe: pipe.set_adapters(["ink", "snow"], [0.9, 0.3]),
            lambda pipe: pipe.set_adapters("snow"),
        )
    finally:
        for pipe in (parallel, plain):
            pipe.unload_lora_weights()


@pytest.mark.parametrize("read", ["in it", "before"])
def test_a_callback_gives_a_method_a_network(parallel: ParallelPipeline, plain: Any, loras: Path, read: str) -> None:
    """On each rank it is the network of that rank, as between calls."""
    layers, _ = plain.lora_state_dict(loras, weight_name="ink.safetensors")
    before = {id(pipe): pipe.unet for pipe in (parallel, plain)}

    def load(pipe: Any) -> None:
        network = pipe.unet if read == "in it" else before[id(pipe)]
        pipe.load_lora_into_unet(layers, None, network, adapter_name="ink")

    parallel.plan = "cfg=2"
    changed_as_in_one_process(parallel, plain, load, lambda pipe: pipe.unload_lora_weights())


@pytest.mark.parametrize("plan", first_of(["cfg=2", "patch=2"], "cfg=2"))
def test_a_callback_sets_the_scale_of_an_ip_adapter(parallel: ParallelPipeline, plain: Any, plan: str) -> None:
    parallel.plan = plan
    torch.manual_seed(0)
    weights, seen = image_weights(plain.unet), torch.randn(2, 1, SEEN)
    try:
        for pipe in (parallel, plain):
            pipe.load_ip_adapter(weights, "", "adapter.safetensors", image_encoder_folder=None)
        changed_as_in_one_process(
            parallel,
            plain,
            lambda pipe: pipe.set_ip_adapter_scale(0.2),
            lambda pipe: pipe.set_ip_adapter_scale(1.0),
            ip_adapter_image_embeds=[seen],
        )
    finally:
        for pipe in (parallel, plain):
            pipe.unload_ip_adapter()


@pytest.mark.parametrize(
    ("look", "kind", "words"),
    [
        (lambda pipe: pipe.scheduler, AttributeError, r"pipe\.scheduler cannot be read inside callback_on_.*num_times"),
        (lambda pipe: pipe.unet.config, AttributeError, r"pipe\.unet\.config cannot be read inside.*it can be set"),
        (
            lambda pipe: pipe.encode_prompt("x"),
            UnsupportedModel,
            r"pipe\.encode_prompt\(\) cannot be called inside callback_on_step_end, because the ranks are busy",
        ),
        (
            lambda pipe: setattr(pipe, "scheduler", DDIMScheduler()),
            UnsupportedModel,
            r"pipe\.scheduler cannot be replaced in callback_on_step_end.*between two calls",
        ),
    ],
)
def test_what_a_callback_cannot_have(parallel: ParallelPipeline, look: Any, kind: Any, words: str) -> None:
    with pytest.raises(kind, match=words):
        parallel(**CALL, generator=generator(), callback_on_step_end=at_step(0, look))


def test_steps_are_reported(parallel: ParallelPipeline, capfd: pytest.CaptureFixture[str]) -> None:
    seen: list[tuple[int, int]] = []
    parallel.on_step = lambda step, total: seen.append((step, total))
    parallel(**CALL, generator=generator())
    assert seen == [(1, 4), (2, 4), (3, 4), (4, 4)]
    assert "it/s" not in capfd.readouterr().err


def test_the_progress_bar(parallel: ParallelPipeline, capfd: pytest.CaptureFixture[str]) -> None:
    parallel.set_progress_bar_config(desc="drawing")
    parallel(**CALL, generator=generator())
    displayed = capfd.readouterr().err
    assert "drawing" in displayed
    assert "4/4" in displayed
    parallel.set_progress_bar_config(disable=True)
    parallel(**CALL, generator=generator())
    assert capfd.readouterr().err == ""
