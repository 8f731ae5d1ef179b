"""Bad input is refused with value, limit and way out, before any worker is started or does any work."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers.models.attention import BasicTransformerBlock

from patchpar import ParallelPipeline, Plan, PlanError, UnsupportedModel, VerificationError
from patchpar.launch.devices import count_named
from patchpar.pipeline import startup
from patchpar.pipeline.step_callbacks import checked_answer
from patchpar.pipeline.validate import noise_of_first
from tests.tiny import build

from .conftest import EXACT, QUICK, Hold, generator, relative_error


@pytest.fixture
def no_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Starting a worker or loading anything fails the test."""

    def started(*_: Any, **__: Any) -> None:
        pytest.fail("a worker was started")

    monkeypatch.setattr("patchpar.launch.worker_start.WorkerProcess", started)
    monkeypatch.setattr("patchpar.pipeline.startup.InlineExecutor.call", started)


@pytest.fixture
def no_work(parallel: ParallelPipeline, monkeypatch: pytest.MonkeyPatch) -> ParallelPipeline:
    """A running pool that may not be asked anything."""
    monkeypatch.setattr(parallel._executor, "call", lambda *_, **__: pytest.fail("the workers were asked"))
    return parallel


LONG = "9" * 5000
"""More digits than Python reads."""


def says(*words: str) -> str:
    """A pattern for a message that holds all words, in any order."""
    return "".join(f"(?=.*{word})" for word in words)


# --- before anything is started ---------------------------------------------------------------------------------


@pytest.mark.usefixtures("no_start")
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"devices": "cpu:3", "plan": "cfg=2,patch=2"}, ["cfg=2 x patch=2", "there are 3", "use 4 devices"]),
        ({"devices": 2, "plan": Plan(patch=3)}, ["takes 3", "there are 2"]),
        ({"plan": "rows=2"}, ["'rows'", "data, cfg, stage, patch, tensor"]),
        ({"plan": "cfg"}, ["'cfg'", "axis=degree"]),
        ({"plan": "cfg=two"}, ["cfg=two", "whole number"]),
        ({"plan": "cfg=0"}, ["cfg=0", "at least 1"]),
        ({"plan": 2}, ["plan=2", "'auto'"]),
        ({"plan": "patch=2,split=diagonal"}, ["diagonal", "auto, rows, columns"]),
        ({"plan": "patch=2,strategy=psychic"}, ["'psychic'", "exact"]),
        ({"plan": "patch=2,strategy=exact:speed=9"}, ["'exact'", "speed=9", "its options are attention, ulysses"]),
        ({"plan": "tensor=2", "devices": 2}, [r"unet \(UNet2DConditionModel\)", "axis 'tensor'", "Use patch=N"]),
        ({"plan": "stage=2,strategy=piped", "devices": 2}, ["tokens of a transformer", "UNet2DConditionModel"]),
        ({"plan": "cfg=2,patch=2,strategy=structure", "devices": 4}, ["splits guidance", "patch=4"]),
        (
            {"plan": "patch=2,weights=sharded,strategy=structure", "devices": 2},
            ["divides weights", "use weights=whole"],
        ),
        ({"plan": "stage=2,patch=2,strategy=structure", "devices": 4}, ["into stages", "all devices to axis 'patch'"]),
        ({"plan": "tensor=2,strategy=structure", "devices": 2}, ["features over axis 'tensor'", "use tensor=1"]),
        ({"devices": 0}, ["devices=0", "at least 1"]),
        ({"devices": -2}, ["-2", "at least 1"]),
        ({"devices": []}, ["empty list", "cpu:4"]),
        ({"devices": "tpu"}, ["'tpu'", "cpu:4"]),
        ({"devices": 2.5}, ["2.5", "float"]),
        ({"devices": ["cuda:97"]}, ["cuda:97", "does not exist"]),
        ({"devices": "cpu:100000"}, ["100000", "between 1 and"]),
        ({"devices": LONG}, ["9{70}\\S* is not a device"]),
        ({"devices": f"cpu:{LONG}"}, ["'cpu:9{70}\\S*: 'cpu:N' means"]),
        ({"devices": f"ray:{LONG}"}, ["'ray:9{70}\\S*: 'ray:N' means"]),
        ({"devices": f"cuda:{LONG}"}, ["9{70}\\S* is not a device"]),
        ({"deadline": 0}, ["deadline=0", "seconds above 0"]),
        ({"start_timeout": "soon"}, ["start_timeout='soon'", "seconds"]),
        ({"start_method": "fork"}, ["start_method='fork'", "'forkserver' or 'spawn'"]),
        ({"verify": 3}, ["verify=3", "folder"]),
        ({"trusted_code": "my_module"}, ["trusted_code='my_module'", "a list of names", r"\['my_module'\]"]),
        ({"trusted_code": ["my module"]}, ["'my module' is no name of a module"]),
        ({"trusted_code": [len]}, ["<built-in function len> is no name of a module"]),
        ({"secret_file": 7}, ["secret_file=7", "path of a file"]),
        ({"secret_file": "/no/such/secret"}, ["secret_file='/no/such/secret'", "No such file"]),
        ({"secret_file": "/dev/null"}, ["/dev/null", "no regular file"]),
        ({"trusted_network": "yes"}, ["trusted_network='yes'", "True or False"]),
        ({"secret_file": "/no/such/secret", "trusted_network": True}, ["secret_file and trusted_network", "use one"]),
        ({"device_map": "balanced"}, ["device_map='balanced'", "weights=sharded", "plan="]),
        ({"use_safetensors": False}, ["use_safetensors=False", "pickles"]),
        ({"device": 2}, ["device=2", "devices= names them"]),
        ({"strategy": "fresh-edges"}, ["strategy='fresh-edges'", "part of the plan"]),
    ],
    ids=lambda value: f"{value!s:.100}" if isinstance(value, dict) else "",
)
def test_plans_devices_and_options(sdxl_folder: Path, options: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(PlanError, match=says(*words)) as caught:
        ParallelPipeline.from_pretrained(sdxl_folder, **options)
    assert len(str(caught.value)) < 2000
    assert isinstance(caught.value, ValueError)


@pytest.mark.usefixtures("no_start")
@pytest.mark.parametrize("devices", [4, "4", "cpu:4", ["cpu"] * 4, "cpu,cpu,cpu,cpu", "ray:4"])
def test_devices_that_torchrun_has_not_started(
    sdxl_folder: Path, monkeypatch: pytest.MonkeyPatch, devices: object
) -> None:
    """Its variables may come from elsewhere: some clusters set them for each process."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(PlanError, match=says("devices=", "are 4", "torchrun has started 1 rank,", "unset")):
        ParallelPipeline.from_pretrained(sdxl_folder, devices=devices)
    for other in ("auto", "cpu", "cuda", torch.device("cuda"), "cpu:²"):
        assert count_named(other) is None
    for other in (1, "1", "cpu:1", "ray:1", ["cuda:3"], "cuda:3", torch.device("cuda", 3)):
        assert count_named(other) == 1


@pytest.mark.parametrize(("devices", "kind"), [("auto", None), (2, None), ("cpu", "cpu"), ("cpu:2", "cpu")])
def test_ranks_of_torchrun_are_on_the_type_of_device_that_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, devices: object, kind: str | None
) -> None:
    """A machine with GPUs had them on these, whatever was asked for."""
    asked = []

    def made(engine: str, **options: Any) -> Any:
        asked.append(options["device"])
        return SimpleNamespace(start=lambda: None)

    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(startup, "TorchrunExecutor", made)
    times = {"deadline": 1.0, "start_timeout": 1.0, "start_method": "auto"}
    startup.check_request(devices, "auto", **times, verify=True, vae="auto").executor()
    assert asked == [kind]


@pytest.mark.usefixtures("no_start")
def test_gpus_that_are_not_there(sdxl_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("patchpar.launch.accelerators.device_count", lambda kind: 2 if kind == "cuda" else 0)
    with pytest.raises(PlanError, match=says("'cuda:2' does not exist", "cuda:0, cuda:1")):
        ParallelPipeline.from_pretrained(sdxl_folder, devices=["cuda:0", "cuda:2"])
    with pytest.raises(PlanError, match=says("'cuda' in devices names none of them", "'cuda:0'", "devices='cuda'")):
        ParallelPipeline.from_pretrained(sdxl_folder, devices=torch.device("cuda"))
    with pytest.raises(PlanError, match=says("devices=4", "use at most 2", "cpu:4")):
        ParallelPipeline.from_pretrained(sdxl_folder, devices=4)


@pytest.mark.usefixtures("no_start")
@pytest.mark.parametrize("model", ["no such model", "/no/such/folder", "", "a/b/c"])
def test_paths_that_are_no_model(model: str) -> None:
    with pytest.raises(PlanError, match=says(f"'{model}'", "model_index.json", "embedded")):
        ParallelPipeline.from_pretrained(model, devices=2)


@pytest.mark.usefixtures("no_start")
def test_a_folder_without_an_index(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=says(str(tmp_path), "no model_index.json")):
        ParallelPipeline.from_pretrained(tmp_path, devices=2)
    (tmp_path / "model_index.json").write_text("{half of it")
    with pytest.raises(PlanError, match=says("model_index.json", "not valid JSON")):
        ParallelPipeline.from_pretrained(tmp_path, devices=2)
    (tmp_path / "model_index.json").write_text("[]")
    with pytest.raises(PlanError, match=says("model_index.json", "no JSON object")):
        ParallelPipeline.from_pretrained(tmp_path, devices=2)


UNET = Path("unet") / "diffusion_pytorch_model.safetensors"


def as_pickle(weights: Path) -> None:
    weights.rename(weights.with_suffix(".bin"))


def cut_in_the_header(weights: Path) -> None:
    weights.write_bytes(weights.read_bytes()[:100])


def cut_in_the_weights(weights: Path) -> None:
    weights.write_bytes(weights.read_bytes()[:-10])


def of_a_huge_header(weights: Path) -> None:
    weights.write_bytes(b"\xff" * 7 + b"\x0f" + weights.read_bytes()[8:])


def of_another_kind(weights: Path) -> None:
    header = json.dumps({"a": 3}).encode()
    weights.write_bytes(len(header).to_bytes(8, "little") + header)


@pytest.mark.usefixtures("no_start")
@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (as_pickle, ["unet has weights only as pickles", "safetensors"]),
        (Path.unlink, ["unet has a config.json but no safetensors"]),
        (cut_in_the_header, [str(UNET), "not a whole safetensors file"]),
        (cut_in_the_weights, [str(UNET), "should have", "bytes but has", "fetch it again"]),
        (of_a_huge_header, [str(UNET), "not a whole safetensors file"]),
        (of_another_kind, [str(UNET), "not a whole safetensors file"]),
    ],
)
def test_weight_files(sdxl_folder: Path, tmp_path: Path, harm: Callable[[Path], object], words: list[str]) -> None:
    model = Path(shutil.copytree(sdxl_folder, tmp_path / "model"))
    harm(model / UNET)
    with pytest.raises(PlanError, match=says(*words)):
        ParallelPipeline.from_pretrained(model, devices=2)


@pytest.mark.usefixtures("no_start")
def test_a_variant_that_is_not_named() -> None:
    from patchpar.models.files import embedded_model

    with pytest.raises(PlanError, match=says("fp16.safetensors", "variant=")):
        ParallelPipeline.from_pretrained(embedded_model(), devices=2)


@pytest.mark.usefixtures("no_start")
def test_not_enough_memory(sdxl_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = sum(file.stat().st_size for file in sdxl_folder.rglob("*.safetensors"))
    monkeypatch.setattr("patchpar.models.files.free_memory", lambda: int(2.5 * weights))
    with pytest.raises(PlanError, match=says("3 CPU ranks need about", "MiB are free", "at most 2", "smaller dtype")):
        ParallelPipeline.from_pretrained(sdxl_folder, devices="cpu:3")
    monkeypatch.setattr("patchpar.models.files.free_memory", lambda: weights // 2)
    with pytest.raises(PlanError, match=says("1 CPU rank needs", "use a smaller dtype")):
        ParallelPipeline.from_pretrained(sdxl_folder, devices="cpu")


def test_ranks_on_gpus_convert_weights_in_the_host(sdxl_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has a copy of its own meanwhile. In the dtype of the files all share the pages of the files."""
    from patchpar.models.files import check_memory, inspect_folder

    folder, gpus = inspect_folder(sdxl_folder), ("cuda:0", "cuda:1", "cuda:2")
    monkeypatch.setattr("patchpar.models.files.free_memory", lambda: int(1.25 * folder.weight_bytes))
    check_memory("tiny", folder, {}, gpus)
    words = [
        "3 GPU ranks need about",
        "of host memory to convert the weights of tiny",
        "at most 2",
        "that of the files",
    ]
    with pytest.raises(PlanError, match=says(*words)):
        check_memory("tiny", folder, {"torch_dtype": torch.float16}, gpus)
    check_memory("tiny", folder, {"torch_dtype": torch.float16}, gpus[:2])
    check_memory("a model of the hub", None, {}, gpus)


def test_half_precision_needs_half_the_memory(sdxl_folder: Path) -> None:
    from patchpar.models.files import inspect_folder, needed_bytes

    folder = inspect_folder(sdxl_folder)
    full = needed_bytes(folder, {})
    assert full == pytest.approx(folder.weight_bytes, rel=0.2)
    assert needed_bytes(folder, {"torch_dtype": torch.float16}) * 2 == full
    assert needed_bytes(folder, {"torch_dtype": "bfloat16"}) * 2 == full
    assert needed_bytes(None, {}) == 0


@pytest.mark.usefixtures("no_start")
@pytest.mark.parametrize("thing", ["stabilityai/sdxl", torch.nn.Linear(2, 2), None, 3])
def test_what_is_no_pipeline(thing: Any) -> None:
    with pytest.raises(PlanError, match=says("is no diffusers pipeline", "from_pretrained")):
        ParallelPipeline(thing, devices=2)


# --- before a call ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("plan", "arguments", "words"),
    [
        ("auto", {"height": 100}, ["height=100", "multiple of 8", "96 or 104"]),
        ("auto", {"width": 4}, ["width=4", "multiple of 8", "use 8"]),
        ("auto", {"width": -8}, ["width=-8", "pixels, at least 8"]),
        ("auto", {"height": 0}, ["height=0", "at least 8"]),
        ("auto", {"height": 96.0}, ["height=96.0", "whole number"]),
        ("auto", {"generator": 3}, ["generator=3", r"torch\.Generator\(\)\.manual_seed\(3\), or a list"]),
        ("auto", {"generator": (torch.Generator(),)}, [r"generator=\(<torch", "or a list"]),
        ("auto", {"generator": [torch.Generator(), 7]}, [r"generator=\[<torch", "one for each image"]),
        ("auto", {"callback_on_step_end": "print"}, ["callback_on_step_end='print' is no function"]),
        ("auto", {"num_inference_steps": 0}, ["num_inference_steps=0", "at least 1"]),
        ("auto", {"num_inference_steps": -1}, ["num_inference_steps=-1", "at least 1"]),
        ("auto", {"num_inference_steps": 1.5}, ["num_inference_steps=1.5", "whole number"]),
        ("auto", {"num_images_per_prompt": 0}, ["num_images_per_prompt=0", "at least 1"]),
        ("auto", {"prompt": []}, ["prompt is an empty list", "at least one"]),
        ("auto", {"prompt": 3}, ["prompt is a int", "a text or a list"]),
        ("auto", {"prompt": ["a", None]}, ["prompt holds a NoneType", "a text or a list"]),
        ("auto", {"prompt": "gr\udcfcn"}, ["prompt has '.udcfc' at character 3", "UTF-8", "C.UTF-8"]),
        ("auto", {"prompt": {0: "a"}}, ["prompt is a dict", "a text or a list"]),
        ("auto", {"negative_prompt": {"a"}}, ["negative_prompt is a set", "a text or a list"]),
        ("auto", {"callback": print}, ["callback=", "callback_on_step_end="]),
        (
            "patch=2",
            {"height": 32, "width": 32},
            ["4 latent rows make 1 band of 4 rows", "2 ranks", "at most 1", "64 pixels"],
        ),
        ("patch=2", {"height": 16, "width": 48}, ["6 latent columns make 1 band of 4 columns", "width of at least 64"]),
        ("patch=2,split=rows", {"height": 32, "width": 512}, ["4 latent rows", "height of at least 64 pixels"]),
        ("cfg=2", {"guidance_scale": 1.0}, ["cfg=2", "guidance_scale > 1", "cfg=1"]),
        ("data=2", {}, ["data=2", "1 prompt", "list of at least 2"]),
    ],
    ids=lambda value: re.sub(" at 0x[0-9a-f]+", "", str(value)) if isinstance(value, dict) else "",
)
def test_values_of_a_call(no_work: ParallelPipeline, plan: str, arguments: dict[str, Any], words: list[str]) -> None:
    no_work.plan = plan
    with pytest.raises(PlanError, match=says(*words)) as caught:
        no_work(**{**QUICK, **arguments})
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize("model", [None, 3])
def test_a_model_that_is_no_text(model: Any) -> None:
    with pytest.raises(PlanError, match=says(f"'{model}' is no valid path", "str")):
        ParallelPipeline.from_pretrained(model, devices=2)


def test_a_function_for_steps_that_is_none(no_work: ParallelPipeline) -> None:
    with pytest.raises(PlanError, match=says("on_step='print' is no function", "or None")):
        no_work.on_step = "print"  # type: ignore[assignment]
    assert no_work.on_step is None


@pytest.mark.parametrize("answer", [5, "latents", ["latents"]])
def test_what_a_callback_cannot_return(answer: object) -> None:
    with pytest.raises(PlanError, match=says("callback_on_step_end has returned", type(answer).__name__, "or nothing")):
        checked_answer(answer)
    assert checked_answer(None) == {}


@pytest.mark.parametrize(
    ("args", "kwargs", "words"),
    [
        ((), {"num_inference_step": 3}, ["num_inference_step", "did you mean 'num_inference_steps'"]),
        (("a",), {"prompt": "b"}, ["prompt twice"]),
        (("a",) * 60, {}, ["at most", "60 were given"]),
    ],
)
def test_arguments_that_do_not_fit(no_work: ParallelPipeline, args: Any, kwargs: Any, words: list[str]) -> None:
    with pytest.raises(TypeError, match=says(*words)):
        no_work(*args, **kwargs)


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        ("cfg=2,patch=2", ["takes 4 devices", "there are 2"]),
        ("depth=2", ["'depth'", "data, cfg, stage, patch, tensor"]),
        ("patch=2,strategy=psychic", ["psychic", "exact"]),
        ("patch=2,strategy=exact:ulysses=4", ["ulysses=4 does not divide 2 ranks", "use 1, 2"]),
        ("patch=2,strategy=exact:attention=star", ["attention='star'", "token-ring"]),
    ],
)
def test_a_plan_that_is_set_later(no_work: ParallelPipeline, plan: str, words: list[str]) -> None:
    with pytest.raises(PlanError, match=says(*words)):
        no_work.plan = plan
    assert no_work.plan is None


class Sorted(BasicTransformerBlock):
    """Puts its tokens in order: what each rank has of them depends on all."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs).sort(dim=1).values


def with_sorted_tokens() -> Any:
    """A transformer whose tokens cannot be split."""
    found = build("pixart").pipe
    for block in found.transformer.transformer_blocks:
        block.__class__ = Sorted
    return found


WHOLE = build("pixart").call_kwargs | {"num_inference_steps": 2, "guidance_scale": 1.0}


def test_a_transformer_that_cannot_be_split(hold: Hold) -> None:
    words = ["PixArtTransformer2DModel cannot be split by tokens", "Sorted", "cfg=2", "data=N"]
    with hold(with_sorted_tokens()) as parallel:
        parallel.plan = "patch=2"
        with pytest.raises(UnsupportedModel, match=says(*words)):
            parallel(**WHOLE)


def test_an_automatic_plan_does_without_what_cannot_be_split(hold: Hold) -> None:
    pipe = with_sorted_tokens()
    with hold(pipe) as parallel:
        got = parallel(**WHOLE, generator=generator(), output_type="latent")
        assert str(parallel.plan) == "single"
        assert re.search("2 of 2 devices idle|1 of 2 devices idle", parallel.explain())
        assert "PixArtTransformer2DModel cannot be split by tokens" in parallel.explain()
        assert relative_error(got, pipe(**WHOLE, generator=generator(), output_type="latent")) <= EXACT


def test_an_automatic_plan_does_without_tokens_that_are_not_exact(hold: Hold, monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = build("pixart").pipe
    error = VerificationError("its tokens differ: use plan cfg=2. What was found:\nblocks, layers")
    with hold(pipe) as parallel:
        executor = parallel._state.executor
        call = executor.call

        def split(method: str, *args: Any, **kwargs: Any) -> Any:
            if method == "generate" and args[1].plan.patch > 1:
                raise error
            return call(method, *args, **kwargs)

        monkeypatch.setattr(executor, "call", split)
        parallel.plan = "patch=2"
        with pytest.raises(VerificationError, match="its tokens differ"):
            parallel(**WHOLE)
        parallel.plan = "auto"
        got = parallel(**WHOLE, generator=generator(), output_type="latent")
        assert str(parallel.plan) == "single"
        assert parallel.explain().endswith("its tokens differ: use plan cfg=2, and there is no guidance to split")
        assert relative_error(got, pipe(**WHOLE, generator=generator(), output_type="latent")) <= EXACT


def test_sizes_of_a_transformer(hold: Hold) -> None:
    with (
        hold(build("qwen").pipe) as parallel,
        pytest.raises(PlanError, match=says("height=136", "multiple of 16", "128 or 144")),
    ):
        parallel(prompt="a", height=136, width=128, num_inference_steps=2)


def test_a_transformer_that_diffusers_has_split(parallel: ParallelPipeline) -> None:
    pipe = build("flux").pipe
    pipe.transformer._parallel_config = object()
    with pytest.raises(UnsupportedModel, match=says("transformer is parallel already", "without parallel_config")):
        ParallelPipeline(pipe, devices="cpu")


def test_a_wrong_call_leaves_the_pool_usable(parallel: ParallelPipeline, plain: Any) -> None:
    pids = parallel._executor.pids
    for wrong in ({"height": 100}, {"guidance_scale": "strong"}, {"latents": torch.zeros(1, 3, 8, 8)}):
        with pytest.raises((ValueError, TypeError, RuntimeError)):
            parallel(**{**QUICK, **wrong})
    call = {**QUICK, "output_type": "latent"}
    assert relative_error(parallel(**call, generator=generator()), plain(**call, generator=generator())) <= EXACT
    assert parallel._executor.pids == pids


def test_what_diffusers_refuses_itself(parallel: ParallelPipeline, plain: Any) -> None:
    wrong = {**QUICK, "generator": [generator()] * 3}
    for pipe in (plain, parallel):
        with pytest.raises(ValueError, match="list of generators of length 3"):
            pipe(**wrong)


@pytest.mark.parametrize(
    ("devices", "widths"), [(("cuda:0", "cuda:1"), (221184, 196608)), (("xpu:0", "xpu:1"), (1024, 2048))], ids=str
)
def test_unequal_gpus_have_the_noise_of_the_first(devices: tuple[str, ...], widths: tuple[int, ...]) -> None:
    """Unless the CPU samples it; refused where the first one's cannot be that of all."""
    plan, over_prompts = Plan(cfg=2), Plan(data=2)
    of_cpu = torch.Generator()
    of_gpu = type("Generator", (), {"__module__": "torch", "device": torch.device(devices[0])})()
    for kwargs in ({}, {"generator": None}, {"generator": of_gpu}, {"generator": [of_cpu, of_gpu]}):
        assert noise_of_first(kwargs, plan, devices, widths)
        assert not noise_of_first(kwargs, plan, devices, (widths[0], widths[0]))
        with pytest.raises(PlanError, match=says("of different kinds", r"types \['cpu', ", "let the CPU sample it")):
            noise_of_first(kwargs, plan, (devices[0], "cpu"), (widths[0], 0))
    with pytest.raises(PlanError, match=says("of different kinds", devices[0], "data=2", "of 2 generators", "data=1")):
        noise_of_first({"generator": [of_cpu, of_gpu]}, over_prompts, devices, widths)
    assert noise_of_first({"generator": of_gpu}, over_prompts, devices, widths)
    for kwargs in ({"generator": of_cpu}, {"generator": [of_cpu, of_cpu]}):
        for kinds in (devices, (devices[0], "cpu")):
            assert not noise_of_first(kwargs, over_prompts, kinds, widths)
