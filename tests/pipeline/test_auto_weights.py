"""Where plan="auto" holds weights: whole where they fit, else the first of encoders=one, sharded, hosted that does."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DiffusionPipeline

from benchmarks.weights.model import CALL, save_model
from patchpar import ParallelPipeline, Plan
from patchpar.errors import PlanError
from patchpar.launch.host_memory import FreeMemory
from patchpar.models.dry_run.call_memory import CallMemory
from patchpar.models.dry_run.empty_pipeline import emptied_copy, empty_pipeline
from patchpar.models.dry_run.plan_memory import NetworkBytes, memory_of, network_bytes
from patchpar.models.info import describe
from patchpar.models.loading import load_pipeline
from patchpar.pipeline.auto_plan import choose, choose_for_upscale
from patchpar.pipeline.auto_weights import USED, ModelForecast, WeightChoice, advice, choose_weights, is_small, shortage
from patchpar.pipeline.held_weights import _forecast
from patchpar.pipeline.model_to_load import ModelInFiles, ModelInMemory
from tests import tiny
from tests.tensors import relative
from tests.unit.test_model_folder import in_cache
from tests.weights.quantised import Int8Weight

GIB = 2**30
NETWORKS = {
    "transformer": NetworkBytes(outside=GIB, blocks=(GIB,) * 22, is_encoder=False, is_divided=True),
    "text_encoder": NetworkBytes(outside=GIB // 2, blocks=(GIB // 2,) * 17, is_encoder=True, is_divided=True),
    "vae": NetworkBytes(outside=GIB // 4, blocks=(), is_encoder=False, is_divided=False),
}
MODEL = ModelForecast(NETWORKS, CallMemory(denoise=2 * GIB))
TERABYTE = 1000 * GIB


def free(device: float | None, host: float) -> FreeMemory:
    return FreeMemory(device=None if device is None else int(device * GIB / USED), host=int(host * GIB / USED))


@pytest.mark.parametrize(
    ("devices", "device", "host", "plan"),
    [
        (2, 35, 0, None),
        (2, 34, 0, "patch=2,weights=sharded,resident=17"),
        (2, 21.5, 0, "patch=2,weights=sharded"),
        (2, 12, 40, "patch=2,weights=hosted,resident=3"),
        (2, 7, 40, "patch=2,weights=hosted"),
        (1, 35, 0, None),
        (1, 7, 40, "weights=hosted"),
        (2, None, 69, None),
        (2, None, 61, "patch=2,encoders=one"),
        (2, None, 45, "patch=2,weights=sharded"),
    ],
)
def test_the_first_that_fits(devices: int, device: float | None, host: float, plan: str | None) -> None:
    found = choose_weights(MODEL, devices, free(device, host))
    assert (None if found.plan is None else str(found.plan).removesuffix(",strategy=exact")) == plan
    if plan is not None:
        assert "whole weights and activations take 34.2 GiB on each rank" in found.reason
        assert "weights=" in found.reason or "encoders=one" in found.reason
        stated = [] if device is None else [f"{device / USED:.1f} GiB of a device"]
        of_host = f"{host / USED:.1f} GiB of host memory" if host else "0 B of host memory"
        assert f"{' and '.join([*stated, of_host])} are free" in found.reason


def test_no_plan_fits() -> None:
    with pytest.raises(PlanError, match=r"no plan for 2 devices has room .* takes least, 4\.8 GiB on a device, and 30"):
        choose_weights(MODEL, 2, free(1, 40))
    assert "no plan for these devices" in advice(Plan(patch=2), MODEL, free(1, 40))


def test_activations_that_fit_beside_nothing_are_divided_and_said() -> None:
    divided = choose_weights(replace(MODEL, call=CallMemory(denoise=20 * GIB)), 2, free(21, 40))
    assert divided.plan is not None
    assert divided.plan.weights == "hosted"
    assert not divided.is_tight, "each rank has about a half of them"
    tight = choose_weights(replace(MODEL, call=CallMemory(denoise=60 * GIB)), 2, free(21, 40))
    assert tight.plan == Plan(patch=2, weights="sharded"), "no resident blocks"
    assert tight.is_tight
    assert "may not fit" in tight.reason


def test_small_weights_are_whole_and_nothing_is_forecast() -> None:
    assert is_small(10 * GIB, 4, FreeMemory(device=24 * GIB, host=0))
    assert not is_small(13 * GIB, 1, FreeMemory(device=24 * GIB, host=TERABYTE))
    assert is_small(10 * GIB, 2, FreeMemory(device=None, host=40 * GIB))
    assert not is_small(10 * GIB, 3, FreeMemory(device=None, host=40 * GIB))
    assert is_small(10 * GIB, 3, FreeMemory(device=None, host=None)), "unknown"
    assert is_small(0, 3, FreeMemory(device=1, host=1)), "unknown"


def test_the_least_of_all_ranks_counts() -> None:
    ranks = [FreeMemory(device=5, host=9), FreeMemory(device=7, host=8), FreeMemory(device=None, host=None)]
    assert FreeMemory.least(ranks) == FreeMemory(device=5, host=8)
    assert FreeMemory(device=None, host=100).times(0.5) == FreeMemory(device=None, host=50)


def test_advice_is_for_the_devices_of_the_plan() -> None:
    assert "use plan='patch=2,weights=sharded" in advice(Plan(tensor=2), MODEL, free(21.5, 0))
    assert "use plan='weights=hosted" in advice(Plan(), MODEL, free(8, 40))


def test_a_refusal_has_the_formula_of_both_plans() -> None:
    text = advice(Plan(patch=2), MODEL, free(21.5, 0))
    assert text.startswith(
        "plan patch=2,strategy=exact takes 34.2 GiB on a device (32.2 GiB weights + 2.0 GiB activations ("
    )
    assert re.search(r"use plan='patch=2,weights=sharded\S*', which takes .*its part of the blocks \+ .*slots", text)


def test_an_image_that_does_not_fit_beside_the_weights_is_said() -> None:
    large = replace(MODEL, call=CallMemory(denoise=9 * GIB, decode=GIB))
    text = shortage(Plan(patch=2), large, FreeMemory(device=40 * GIB, host=0))
    assert "does not fit beside the weights: 40.0 GiB of a device" in text
    assert "(32.2 GiB weights + 9.0 GiB activations (encoding 0 B, denoising 9.0 GiB, VAE 588.8 MiB))" in text
    assert "use plan='patch=2,weights=sharded" in text
    assert text.endswith("or generate smaller images")
    assert not shortage(Plan(patch=2), large, FreeMemory(device=42 * GIB, host=0))
    assert not shortage(Plan(patch=2), replace(MODEL, call=None), FreeMemory(device=GIB, host=0)), "not known"


def test_a_named_plan_whose_weights_fit_alone_is_loaded_with_a_warning(
    folder: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model, call = ModelInFiles.of(folder, {}), CallMemory(denoise=8 * GIB)
    monkeypatch.setattr(ModelForecast, "of", lambda empty: ModelForecast(network_bytes(empty), call))
    for host, warned in ((4 * GIB, True), (100 * GIB, False)):
        monkeypatch.setattr("patchpar.pipeline.model_to_load.free_memory", lambda host=host: host)
        monkeypatch.setattr("patchpar.pipeline.model_to_load.is_small", lambda *_: False)
        caplog.clear()
        model.check(["cpu", "cpu"], Plan(patch=2))
        assert ("does not fit beside the weights" in caplog.text) == warned


def test_of_quantised_weights_nothing_is_forecast_and_they_are_whole(folder: str, tmp_path: Path) -> None:
    quantised = shutil.copytree(folder, tmp_path / "quantised")
    config = quantised / "transformer/config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "quantization_config": {"quant_method": "gguf"}}))
    pipe = tiny.build("qwen").pipe
    weight = pipe.transformer.proj_out._parameters.pop("weight")
    pipe.transformer.proj_out.register_buffer("weight", Int8Weight.of(weight.detach()))
    for model in (ModelInFiles.of(quantised, {}), ModelInMemory(pipe)):
        assert model.forecast() is None
        assert model.chosen(2, free(0.001, 0.001)) == WeightChoice()
    assert advice(Plan(patch=2), None, free(1, 1)) == ""
    assert shortage(Plan(patch=2), None, free(1, 1)) == ""


def test_the_plan_of_a_call_has_all_devices() -> None:
    model = describe(tiny.build("qwen").pipe)
    held = WeightChoice(Plan(patch=4, weights="sharded", resident=2), "weights=sharded: why")
    call = {"height": 512, "width": 512, "negative_prompt": "none", "prompt": ["a"] * 4}
    assert choose(model, 4, call).plan.data > 1
    found = choose(model, 4, call, held)
    assert found.plan == Plan(cfg=2, patch=2, weights="sharded", resident=2)
    assert found.reason.endswith("weights=sharded: why")
    assert choose_for_upscale(model, 4, call, held).plan == found.plan
    assert choose(model, 1, call, WeightChoice(Plan(weights="hosted"), "why")).plan == Plan(weights="hosted")
    with pytest.raises(PlanError, match=r"held by 4 devices together .*cannot be divided .*Use devices=2"):
        choose(replace(model, splits_into_tokens=False, unsplit_reason="no"), 4, call, held)


def test_the_copy_without_weights_has_the_bytes_of_the_pipeline() -> None:
    pipe = tiny.build("flux").pipe
    before = {id(x) for x in pipe.transformer.parameters()}
    copy = emptied_copy(pipe)
    assert network_bytes(copy) == network_bytes(pipe)
    assert all(x.is_meta for x in copy.transformer.parameters())
    assert {id(x) for x in pipe.transformer.parameters()} == before
    assert not any(x.is_meta for x in pipe.transformer.parameters())
    forecast = ModelInMemory(pipe).forecast()
    assert forecast is not None
    assert forecast.activations > 0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model with blocks of which two, in slots, are a small part."""
    path = tmp_path_factory.mktemp("model")
    save_model(path, heads=2, double=1, single=12, dtype=torch.float32)
    return str(path)


def room_for_parts(pipe: Any) -> int:
    """Host memory in which two ranks have room for divided weights, and not for whole ones."""
    networks = network_bytes(pipe)
    divided = sum(memory_of(Plan(patch=2, weights="sharded"), networks).ranks)
    whole = sum(memory_of(Plan(patch=2, encoders="one"), networks).ranks)
    assert divided < whole
    return int((divided + whole) / 2 / USED)


@pytest.mark.breadth  # two workers start for it
def test_a_pipeline_in_memory_is_divided_where_it_does_not_fit(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = load_pipeline(folder, {})
    plain.set_progress_bar_config(disable=True)
    room, forecast = room_for_parts(plain), ModelForecast(network_bytes(plain))
    monkeypatch.setattr("patchpar.pipeline.model_to_load.free_memory", lambda: room)
    monkeypatch.setattr(ModelInMemory, "forecast", lambda self: forecast)
    wanted = plain(**CALL, generator=torch.Generator().manual_seed(0)).images
    with ParallelPipeline(plain, devices="cpu:2") as pipe:
        found = pipe(**CALL, generator=torch.Generator().manual_seed(0)).images
        assert relative(found, wanted) < 1e-5
        assert pipe.plan is not None
        assert pipe.plan.weights == "sharded"
        assert "weights=sharded" in pipe.explain()
        assert "whole weights and activations take" in pipe.explain()


def test_a_folder_is_forecast_before_anything_is_loaded(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    room, model = room_for_parts(empty_pipeline(Path(folder), {})), ModelInFiles.of(folder, {})
    whole = WeightChoice()
    assert model.weights_for(["cpu", "cpu"], None) == whole
    assert model.weights_for(["cuda:0"], None) is None, "its ranks know what is free"
    monkeypatch.setattr("patchpar.pipeline.model_to_load.free_memory", lambda: room)
    monkeypatch.setattr(ModelForecast, "of", lambda empty: ModelForecast(network_bytes(empty)))
    found = model.weights_for(["cpu", "cpu"], None)
    assert found is not None
    assert found.plan is not None
    assert found.plan.weights == "sharded"
    *_, held_bytes, plan = model.arguments(found.plan)
    assert plan == found.plan
    assert held_bytes == model.weight_bytes // 2
    monkeypatch.setattr("patchpar.models.files.free_memory", lambda: model.weight_bytes)
    with pytest.raises(PlanError, match=r"2 CPU ranks need .* use plan='patch=2,weights=sharded"):
        model.weights_for(["cpu", "cpu"], Plan(patch=2))


def test_a_name_of_the_hub_is_forecast_as_its_folder(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its files are fetched before, where they are not in the hub's cache."""
    options, fetches = {"cache_dir": str(tmp_path), "torch_dtype": torch.bfloat16, "task": "inpainting"}, []

    def fetch(name: str, **given: Any) -> str:
        fetches.append((name, given["cache_dir"], "task" in given))
        in_cache(Path(folder), tmp_path)
        return folder

    monkeypatch.setattr(DiffusionPipeline, "download", fetch)
    monkeypatch.setattr(ModelForecast, "of", lambda empty: ModelForecast(network_bytes(empty)))
    plain = ModelInFiles.of(folder, {"torch_dtype": torch.bfloat16})
    for _ in range(2):
        model = ModelInFiles.of("org/model", options)
        assert model.source == "org/model"
        assert model.weight_bytes == plain.weight_bytes > 0
        assert model.forecast() == plain.forecast()
    assert fetches == [("org/model", str(tmp_path), False)], "once"
    others = {"cache_dir": str(tmp_path), "torch_dtype": torch.bfloat16}
    assert _forecast("org/model", others) == plain.forecast(), "on ranks too, where memory is short"
