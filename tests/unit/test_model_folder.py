"""A model folder is looked through before anything is started: whole safetensors only."""

from __future__ import annotations

import json
import re
import shutil
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from patchpar.errors import PlanError
from patchpar.models.files import inspect_folder, lacks_files, resolve_model
from patchpar.models.hub import cached_model
from patchpar.models.loading import load_pipeline

WEIGHTS = {"weight": torch.zeros(16, 16), "bias": torch.zeros(16)}


def folder(path: Path, *, name: str = "diffusion_pytorch_model.safetensors") -> Path:
    """A pipeline of a UNet with weights, a scheduler without, and nothing for the safety checker."""
    entries = {
        "_class_name": "StableDiffusionPipeline",
        "unet": ["diffusers", "UNet2DConditionModel"],
        "scheduler": ["diffusers", "DDIMScheduler"],
        "safety_checker": [None, None],
    }
    for part, config in (("unet", {"_class_name": "UNet2DConditionModel"}), ("scheduler", {})):
        (path / part).mkdir(parents=True)
        (path / part / "config.json").write_text(json.dumps(config))
    (path / "model_index.json").write_text(json.dumps(entries))
    save_file(WEIGHTS, path / "unet" / name)
    return path


def in_cache(path: Path, cache: Path) -> dict[str, str]:
    """Options for a loader that finds the folder's files in the hub's cache, as org/model."""
    repository = cache / "models--org--model"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("0" * 40)
    (repository / "snapshots").mkdir()
    (repository / "snapshots" / ("0" * 40)).symlink_to(path)
    return {"cache_dir": str(cache)}


def test_a_name_of_the_hub_whose_files_are_in_the_cache(tmp_path: Path) -> None:
    options = in_cache(folder(tmp_path / "model"), tmp_path / "cache")
    found = cached_model("org/model", options)
    assert found is not None
    assert found.weight_bytes == inspect_folder(tmp_path / "model").weight_bytes
    assert cached_model("org/model", {**options, "revision": "v2"}) is None
    assert cached_model("org/other", options) is None


def test_a_network_without_its_configuration_is_refused_with_the_command_that_fetches_it(tmp_path: Path) -> None:
    (folder(tmp_path) / "unet" / "config.json").unlink()
    way = f"unet has no config.json, .*hf download ORG/MODEL unet/config.json --local-dir {re.escape(str(tmp_path))}"
    with pytest.raises(PlanError, match=way):
        resolve_model(tmp_path, {})
    with pytest.raises(PlanError, match=way):
        load_pipeline(str(tmp_path), {})
    assert resolve_model(tmp_path, {"unet": object()})[0] == str(tmp_path)


@pytest.mark.parametrize("missing", ["unet", "scheduler", "1 of 2", "part of a file"])
def test_a_name_of_the_hub_with_files_to_be_fetched(tmp_path: Path, missing: str) -> None:
    """As after a fetch that was interrupted, or of the index alone."""
    whole = folder(tmp_path / "model", name="diffusion_pytorch_model-00001-of-00002.safetensors")
    options, file = (
        in_cache(whole, tmp_path / "cache"),
        whole / "unet" / "diffusion_pytorch_model-00002-of-00002.safetensors",
    )
    save_file(WEIGHTS, file)
    assert cached_model("org/model", options) is not None
    if missing == "1 of 2":
        file.unlink()
    elif missing == "part of a file":
        file.write_bytes(file.read_bytes()[:-1])
    else:
        shutil.rmtree(whole / missing)
    assert cached_model("org/model", options) is None


def test_a_whole_folder(tmp_path: Path) -> None:
    found = inspect_folder(folder(tmp_path))
    assert found.pipeline == "StableDiffusionPipeline"
    assert found.weight_bytes == (tmp_path / "unet" / "diffusion_pytorch_model.safetensors").stat().st_size


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda data: data[:-1], r"should have \d+ bytes but has \d+: fetch it again"),
        (lambda data: data + b"x", r"should have \d+ bytes but has \d+: fetch it again"),
        (lambda data: data[:4], "not a whole safetensors file"),
        (lambda data: b"", "not a whole safetensors file"),
        (lambda data: struct.pack("<Q", 2**60) + data[8:], "not a whole safetensors file"),
        (lambda data: data[:8] + b"x" + data[9:], "not a whole safetensors file"),
        (lambda data: struct.pack("<Q", 2) + b"[]" + data[8:], "not a whole safetensors file"),
        (lambda data: struct.pack("<Q", 12) + b'{"a": "bcd"}' + data[8:], "not a whole safetensors file"),
    ],
    ids=["cut short", "too long", "stump", "empty", "huge header", "no JSON", "a list", "no offsets"],
)
def test_a_damaged_weight_file_is_named(tmp_path: Path, damage: object, says: str) -> None:
    file = folder(tmp_path) / "unet" / "diffusion_pytorch_model.safetensors"
    file.write_bytes(damage(file.read_bytes()))  # type: ignore[operator]
    with pytest.raises(PlanError, match=says) as raised:
        inspect_folder(tmp_path)
    assert str(file) in str(raised.value)


@pytest.mark.parametrize("pickle", ["diffusion_pytorch_model.bin", "model.ckpt", "model.pt", "model.pth"])
def test_pickles_alone_are_refused(tmp_path: Path, pickle: str) -> None:
    (folder(tmp_path) / "unet" / "diffusion_pytorch_model.safetensors").rename(tmp_path / "unet" / pickle)
    with pytest.raises(PlanError, match="only as pickles, which can run code"):
        inspect_folder(tmp_path)


def test_no_weights_at_all(tmp_path: Path) -> None:
    (folder(tmp_path) / "unet" / "diffusion_pytorch_model.safetensors").unlink()
    with pytest.raises(PlanError, match=r"unet.* has a config.json but no safetensors weights"):
        inspect_folder(tmp_path)


def test_variants(tmp_path: Path) -> None:
    folder(tmp_path, name="diffusion_pytorch_model.fp16.safetensors")
    assert inspect_folder(tmp_path, "fp16").weight_bytes > 0
    with pytest.raises(PlanError, match="pass variant=, such as 'fp16'"):
        inspect_folder(tmp_path)


def test_a_variant_is_preferred_and_may_be_missing_for_some_parts(tmp_path: Path) -> None:
    """diffusers takes the plain file where a part has no variant."""
    folder(tmp_path)
    small = {name: x.half() for name, x in WEIGHTS.items()}
    plain = inspect_folder(tmp_path, "fp16").weight_bytes
    save_file(small, tmp_path / "unet" / "diffusion_pytorch_model.fp16.safetensors")
    assert inspect_folder(tmp_path, "fp16").weight_bytes < plain == inspect_folder(tmp_path).weight_bytes


@pytest.mark.parametrize("name", ["{}.fp16-{}.safetensors", "{}-{}.fp16.safetensors"])
def test_shards_of_a_variant_by_new_and_old_names(tmp_path: Path, name: str) -> None:
    folder(tmp_path / "model")
    unet = tmp_path / "model" / "unet"
    plain = inspect_folder(tmp_path / "model").weight_bytes
    for shard in ("00001-of-00002", "00002-of-00002"):
        save_file(WEIGHTS, unet / name.format("diffusion_pytorch_model", shard))
    assert inspect_folder(tmp_path / "model").weight_bytes == plain
    assert inspect_folder(tmp_path / "model", "fp16").weight_bytes == 2 * plain
    assert not lacks_files(tmp_path / "model", "fp16")
    unet.joinpath("diffusion_pytorch_model.safetensors").unlink()
    with pytest.raises(PlanError, match="pass variant=, such as 'fp16'"):
        inspect_folder(tmp_path / "model")
    unet.joinpath(name.format("diffusion_pytorch_model", "00002-of-00002")).unlink()
    assert lacks_files(tmp_path / "model", "fp16")


def test_shards_by_both_names_count_once(tmp_path: Path) -> None:
    """diffusers reads those by the new names."""
    folder(tmp_path, name="diffusion_pytorch_model.fp16-00001-of-00001.safetensors")
    alone = inspect_folder(tmp_path, "fp16").weight_bytes
    save_file(WEIGHTS, tmp_path / "unet" / "diffusion_pytorch_model-00001-of-00001.fp16.safetensors")
    assert inspect_folder(tmp_path, "fp16").weight_bytes == alone


@pytest.mark.parametrize("text", ["", "{", "no JSON"])
def test_a_broken_index(tmp_path: Path, text: str) -> None:
    (folder(tmp_path) / "model_index.json").write_text(text)
    with pytest.raises(PlanError, match=r"model_index.json is not valid JSON"):
        inspect_folder(tmp_path)


def test_what_is_no_model_is_refused_with_what_would_be(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"has no model_index.json"):
        resolve_model(tmp_path, {})
    with pytest.raises(PlanError, match=r"no such folder is here: give a folder.*hub name.*'embedded'"):
        resolve_model(tmp_path / "missing" / "folder", {})


def test_hub_names_are_left_to_the_hub() -> None:
    assert resolve_model("some-org/some-model", {"variant": "fp16"}) == (
        "some-org/some-model",
        {"variant": "fp16"},
        None,
    )


def test_components_that_a_pipeline_does_without_are_passed_as_none(tmp_path: Path) -> None:
    assert inspect_folder(folder(tmp_path)).absent == ("safety_checker",)
    source, options, _ = resolve_model(tmp_path, {"variant": "fp16", "torch_dtype": "float16"})
    assert (source, options) == (
        str(tmp_path),
        {"safety_checker": None, "variant": "fp16", "torch_dtype": "float16"},
    )
    checker = object()
    assert resolve_model(tmp_path, {"safety_checker": checker})[1]["safety_checker"] is checker


NOWHERE = [
    "./nowhere",
    "../a/b",
    "nowhere",
    "/no/where",
    "~/no-such-folder",
    "a/b/c",
    "-a/b",
    "a/b-",
    "a..b/c",
    "a--b/c",
]


@pytest.mark.parametrize("model", [*NOWHERE, Path("org/model"), "", "x" * 5000, "org/mo del", "nul\0/l"], ids=str)
def test_a_path_that_leads_nowhere_is_no_name_of_the_hub(model: str | Path) -> None:
    too_long = len(str(model)) > 4096
    says = "is no valid path" if too_long else "is no model, and no such folder is here: give a folder"
    with pytest.raises(PlanError, match=says):
        resolve_model(model, {})


@pytest.mark.parametrize("name", ["model.safetensors", "model-Q4_0.gguf"])
def test_a_single_file_is_refused_with_the_way_to_load_it(tmp_path: Path, name: str) -> None:
    (tmp_path / name).touch()
    with pytest.raises(PlanError, match=r"is a file, and so no model: load it .*from_single_file.* Or give a folder"):
        resolve_model(tmp_path / name, {})


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "fox.png").touch()
    with pytest.raises(PlanError, match="is a file, and so no model: give a folder"):
        resolve_model(tmp_path / "fox.png", {})
