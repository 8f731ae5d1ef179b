"""IP-Adapters come as safetensors too, and so do the encoders of their images: from folders and from the hub."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.loaders import FluxIPAdapterMixin, IPAdapterMixin, SD3IPAdapterMixin
from safetensors.torch import save_file

from patchpar import ParallelPipeline, PlanError
from patchpar.models.ip_adapters import with_checked_sources
from patchpar.pipeline.messages import CallbackChange
from patchpar.pipeline.pipeline_call import carry_out
from tests import tiny
from tests.tiny.adapted_pipelines import image_weights
from tests.tiny.encoders import clip_vision

ADAPTER = {"subfolder": "sdxl", "weight_name": "ip.safetensors"}
OFFLINE = {"local_files_only": True}
PICKLE = r"image_encoder has only pytorch_model\.bin, a pickle, .* convert it to safetensors first"


class Pipe(IPAdapterMixin):
    """As far as a loader looks at a pipeline before it reads anything."""

    image_encoder = None


class FluxPipe(FluxIPAdapterMixin):
    image_encoder = None


class SD3Pipe(SD3IPAdapterMixin):
    image_encoder = None


@pytest.fixture(scope="module")
def safe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an adapter for a small pipeline, and an encoder, as the hub has them."""
    folder = tmp_path_factory.mktemp("adapters")
    weights = image_weights(tiny.build("sdxl").denoiser)
    (folder / "sdxl").mkdir()
    flat = {f"{part}.{name}": x.contiguous() for part, found in weights.items() for name, x in found.items()}
    width = clip_vision().config.projection_dim
    flat["image_proj.proj.weight"] = torch.randn(len(flat["image_proj.proj.bias"]), width)
    save_file(flat, folder / "sdxl" / "ip.safetensors")
    clip_vision().save_pretrained(folder / "sdxl" / "image_encoder")
    return folder


@pytest.fixture
def folder(safe: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(safe, tmp_path / "adapters"))


@pytest.fixture
def pickled(folder: Path) -> Path:
    """The same with its encoder as a pickle, of tensors only, beside safetensors that are nobody's weights."""
    inside = folder / "sdxl" / "image_encoder"
    (inside / "model.safetensors").rename(inside / "other.safetensors")
    torch.save(clip_vision().state_dict(), inside / "pytorch_model.bin")
    return folder


def cached(folder: Path, cache: Path) -> dict[str, Any]:
    """What to tell a loader that finds this folder in the hub's cache, as org/adapters."""
    target = cache / "models--org--adapters"
    shutil.copytree(folder, target / "snapshots" / ("0" * 40))
    (target / "refs").mkdir()
    (target / "refs" / "main").write_text("0" * 40)
    return {"cache_dir": str(cache), **OFFLINE}


def test_an_encoder_in_a_folder_is_no_pickle(pickled: Path) -> None:
    """Whatever the form of the method, by position or by name."""
    encoder = pickled / "sdxl" / "image_encoder"
    for method, args, kwargs in (
        (Pipe().load_ip_adapter, [pickled], ADAPTER),
        (Pipe().load_ip_adapter, [str(pickled), "sdxl", "ip.safetensors"], {}),
        (Pipe().load_ip_adapter, [pickled, "", ["sdxl/ip.safetensors"], "sdxl/image_encoder"], {}),
        (FluxPipe().load_ip_adapter, ["org/flux", "ip.safetensors", "", str(encoder)], {}),
        (FluxPipe().load_ip_adapter, ["org/flux", "ip.safetensors", "", str(pickled), "sdxl/image_encoder"], {}),
        (SD3Pipe().load_ip_adapter, ["org/sd3"], {"image_encoder_folder": str(encoder)}),
        (SD3Pipe().load_ip_adapter, ["org/sd3", "ip.safetensors", str(pickled / "sdxl")], {}),
    ):
        with pytest.raises(PlanError, match=PICKLE):
            with_checked_sources(method, args, kwargs)


def test_of_the_hub_neither(pickled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not fetched; its name is that of the hub's list."""
    fetched = pickled.parent / "fetched"
    (fetched / "sdxl" / "image_encoder").mkdir(parents=True)
    wanted: list[tuple[Any, ...]] = []

    def fetch(name: str, *, allow_patterns: list[str], **options: Any) -> str:
        wanted.append((name, allow_patterns, options))
        return str(fetched)

    names = ["sdxl/ip.safetensors", "sdxl/image_encoder/config.json", "sdxl/image_encoder/pytorch_model.bin"]
    monkeypatch.setattr("huggingface_hub.snapshot_download", fetch)
    monkeypatch.setattr("huggingface_hub.HfApi.list_repo_files", lambda self, name: names)
    with pytest.raises(PlanError, match=f"org/adapters/sdxl/{PICKLE}"):
        with_checked_sources(Pipe().load_ip_adapter, ["org/adapters"], {**ADAPTER, "revision": "v2", "token": "t"})
    inside = "sdxl/image_encoder"
    assert wanted == [("org/adapters", [f"{inside}/*.json", f"{inside}/*.safetensors"], {})]
    with pytest.raises(PlanError, match=r"org/encoder has no model\.safetensors, and so no image encoder"):
        with_checked_sources(FluxPipe().load_ip_adapter, ["org/flux", "a.safetensors", "", "org/encoder"], {})
    assert wanted[-1][:2] == ("org/encoder", ["*.json", "*.safetensors"])


def test_of_the_hub_s_cache_neither(pickled: Path, tmp_path: Path) -> None:
    """Somebody else may have fetched it."""
    options = cached(pickled, tmp_path / "cache")
    with pytest.raises(PlanError, match=PICKLE):
        with_checked_sources(Pipe().load_ip_adapter, ["org/adapters"], {**ADAPTER, **options})
    with pytest.raises(PlanError, match=r"'org/nothing' could not be downloaded from the hub"):
        with_checked_sources(Pipe().load_ip_adapter, ["org/nothing"], {**ADAPTER, **options})


@pytest.mark.parametrize(
    ("file", "facts", "message"),
    [
        ("model.safetensors.index.json", {"weight_map": {"a": "pytorch_model.bin"}}, "names 'pytorch_model.bin'"),
        ("config.json", {"transformers_weights": "adapter_model.bin"}, "names 'adapter_model.bin'"),
        ("config.json", {"_attn_implementation": "somebody/kernels"}, "code from the hub"),
        ("adapter_config.json", {"base_model_name_or_path": "somebody/else"}, "loaded from elsewhere"),
    ],
)
def test_an_encoder_leads_nowhere_else(folder: Path, file: str, facts: dict[str, Any], message: str) -> None:
    (folder / "sdxl" / "image_encoder" / file).write_text(json.dumps(facts))
    with pytest.raises(PlanError, match=message):
        with_checked_sources(Pipe().load_ip_adapter, [folder], ADAPTER)


@pytest.mark.parametrize("source", ["folder", "hub"])
def test_safetensors_are_loaded(source: str, folder: Path, tmp_path: Path) -> None:
    """And nothing but what was looked at: from a folder, whatever the hub has in its place."""
    options = cached(folder, tmp_path / "cache") if source == "hub" else {}
    with ParallelPipeline(tiny.build("sdxl").pipe, devices="cpu", verify=False) as pipe:
        assert pipe.image_encoder is None
        pipe.load_ip_adapter("org/adapters" if options else folder, **ADAPTER, **options)
        assert "IPAdapter" in str(pipe.unet.attn_processors)
        want = clip_vision().from_pretrained(folder / "sdxl" / "image_encoder").state_dict()
        assert all(torch.equal(x, want[name]) for name, x in pipe.image_encoder.state_dict().items())


def test_pickles_are_refused_by_the_pipeline_and_in_its_callbacks(pickled: Path) -> None:
    own = tiny.build("sdxl").pipe
    with (
        ParallelPipeline(own, devices="cpu", verify=False) as pipe,
        pytest.raises(PlanError, match=PICKLE),
    ):
        pipe.load_ip_adapter(pickled, **ADAPTER)
    with pytest.raises(PlanError, match=PICKLE):
        carry_out(own, CallbackChange("load_ip_adapter", (pickled,), ADAPTER))
    assert own.image_encoder is None
    assert "IPAdapter" not in str(own.unet.attn_processors), "nothing was loaded"


def test_encoders_that_nobody_loads_are_not_looked_at(pickled: Path) -> None:
    """The pipeline has one, or takes none."""
    given = {**ADAPTER, "image_encoder_folder": None}
    assert with_checked_sources(Pipe().load_ip_adapter, [pickled], given)[0][0] == pickled
    has_one = Pipe()
    has_one.image_encoder = object()  # type: ignore[assignment]
    assert with_checked_sources(has_one.load_ip_adapter, [pickled], ADAPTER)[0][0] == pickled
    reported = ["org/flux", "ip.safetensors", "", None]
    assert list(with_checked_sources(FluxPipe().load_ip_adapter, reported, {})[0][:4]) == reported


@pytest.mark.parametrize("names", ["a.bin", ["a.safetensors", "a.bin"]])
def test_an_adapter_is_no_pickle(names: Any) -> None:
    """Its file is the second argument of some pipelines, and the third of others."""
    for method, args in (
        (Pipe().load_ip_adapter, ["org/adapters", "models", names]),
        (FluxPipe().load_ip_adapter, ["org/adapters", names]),
    ):
        with pytest.raises(PlanError, match=r"a\.bin is no safetensors file"):
            with_checked_sources(method, args, {})
    with pytest.raises(PlanError, match="reads no pickle"):
        with_checked_sources(Pipe().load_ip_adapter, ["org/adapters", "", "a.safetensors"], {"use_safetensors": False})


def test_an_encoder_that_is_nowhere_is_a_sentence() -> None:
    for target in ("./nowhere", "nowhere", __file__):
        with pytest.raises(PlanError, match="is no folder here and no hub name, so no image encoder"):
            with_checked_sources(FluxPipe().load_ip_adapter, ["org/flux", "a.safetensors", "", target], {})
