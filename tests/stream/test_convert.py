"""Checkpoints as they are published, of a tiny transformer, become folders that stream the same."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import WanTransformer3DModel
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from typer.testing import CliRunner

from patchpar.cli import app
from patchpar.errors import PlanError, UnsupportedModel
from patchpar.models.streaming.checkpoint import load_transformer
from patchpar.models.streaming.config import StreamConfig
from patchpar.models.streaming.convert import convert_checkpoint
from patchpar.models.streaming.video_folder import HIGH_NOISE
from patchpar.stream.causal.pipeline import StreamingPipeline
from patchpar.stream.fifo.pipeline import FifoStreamingPipeline
from patchpar.stream.worker_group import with_default_dtype
from tests.stream.tiny import write_folder
from tests.tensors import noise

Weights = dict[str, Tensor]
SAFETENSORS = "diffusion_pytorch_model.safetensors"
ORIGINAL = (  # (diffusers, Wan's own code), in the order in which they are replaced
    ("condition_embedder.time_embedder.linear_1", "time_embedding.0"),
    ("condition_embedder.time_embedder.linear_2", "time_embedding.2"),
    ("condition_embedder.text_embedder.linear_1", "text_embedding.0"),
    ("condition_embedder.text_embedder.linear_2", "text_embedding.2"),
    ("condition_embedder.time_proj", "time_projection.1"),
    ("attn1", "self_attn"),
    ("attn2", "cross_attn"),
    (".to_out.0.", ".o."),
    (".to_q.", ".q."),
    (".to_k.", ".k."),
    (".to_v.", ".v."),
    ("proj_out", "head.head"),
    ("ffn.net.0.proj", "ffn.0"),
    ("ffn.net.2", "ffn.2"),
    ("norm2", "norm?"),
    ("norm3", "norm2"),
    ("norm?", "norm3"),
)
QUANTISED = "blocks.0.ffn.2.bias"
OFFLINE: dict[str, Any] = {"local_files_only": True}


def original(weights: Weights) -> Weights:
    """The names of Wan's own code."""
    found = {}
    for name, x in weights.items():
        for diffusers_name, own in ORIGINAL:
            name = name.replace(diffusers_name, own)
        name = "head.modulation" if name == "scale_shift_table" else name.replace("scale_shift_table", "modulation")
        found[name] = x
    return found


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model that was distilled, with other weights."""
    folder = write_folder(tmp_path_factory.mktemp("base"), hears=False)
    (folder / "stream.json").unlink()
    return folder


@pytest.fixture(scope="module")
def weights(base: Path) -> Weights:
    of_base = load_file(base / HIGH_NOISE / SAFETENSORS)
    return {name: x + 0.1 * noise(*x.shape, seed=number) for number, (name, x) in enumerate(of_base.items())}


def prefixed(prefix: str, weights: Weights) -> Weights:
    return {prefix + name: x for name, x in weights.items()}


LAYOUTS: dict[str, Callable[[Weights], Any]] = {
    "self-forcing.pt": lambda own: {
        "generator": prefixed("model.", {name: x + 1 for name, x in own.items()}),
        "generator_ema": prefixed("model.", own),
    },
    "self-forcing-fsdp.pt": lambda own: {"generator_ema": prefixed("model._fsdp_wrapped_module.", own)},
    "causvid.pt": lambda own: {"generator": prefixed("model.", own)},
    "causvid.safetensors": lambda own: prefixed("model.", own),
    "causvid-plain.safetensors": lambda own: own,
}


@pytest.mark.parametrize("file", LAYOUTS)
def test_published_layouts(file: str, base: Path, weights: Weights, tmp_path: Path) -> None:
    checkpoint = tmp_path / file
    content = LAYOUTS[file](original(weights))
    save_file(content, checkpoint) if file.endswith(".safetensors") else torch.save(content, checkpoint)
    family = None if file.startswith("self-forcing") else "causvid"
    found = convert_checkpoint(checkpoint, tmp_path / "model", base=base, family=family)
    assert found.family == file.partition(".")[0].split("-")[0].replace("self", "self-forcing")
    assert found.num_weights == sum(x.numel() for x in weights.values())
    written = load_file(tmp_path / "model" / HIGH_NOISE / SAFETENSORS)
    assert written.keys() == weights.keys()
    assert all(torch.equal(written[name], weights[name]) for name in weights)
    config = StreamConfig.load(tmp_path / "model")
    assert (config.sampler, config.blocks.history, config.pipeline_steps) == ("renoise", "clean", 1)
    assert config.steps == (4 if found.family == "self-forcing" else 3)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
    assert sorted(path.name for path in (tmp_path / "model").iterdir()) == sorted(
        ["stream.json", *(path.name for path in base.iterdir())]
    )


def test_a_full_disk_is_a_sentence_and_leaves_nothing(
    base: Path, weights: Weights, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    save_file(original(weights), tmp_path / "a.safetensors")
    monkeypatch.setattr(WanTransformer3DModel, "save_pretrained", full)
    with pytest.raises(PlanError, match=r"model cannot be written: .*No space left on device"):
        convert_checkpoint(tmp_path / "a.safetensors", tmp_path / "model", base=base, family="causvid")
    assert [path.name for path in tmp_path.iterdir()] == ["a.safetensors"]


def test_configurations_of_the_base_are_copied(base: Path, weights: Weights, tmp_path: Path) -> None:
    """Weights are linked: gigabytes. But an editor that writes into a file would change the base too."""
    save_file(original(weights), tmp_path / "a.safetensors")
    shutil.copytree(base, tmp_path / "base")
    convert_checkpoint(tmp_path / "a.safetensors", tmp_path / "model", base=tmp_path / "base", family="causvid")
    links = {
        path.relative_to(tmp_path / "model").as_posix(): path.stat().st_nlink
        for path in (tmp_path / "model").rglob("*")
        if path.is_file() and path.parent.name != HIGH_NOISE
    }
    assert links["model_index.json"] == links["vae/config.json"] == 1
    assert links[f"vae/{SAFETENSORS}"] == 2


def test_weights_that_two_files_have_are_refused(base: Path, weights: Weights, tmp_path: Path) -> None:
    """Such as averaged ones beside the others: which of them are meant nobody says."""
    for name in ("averaged", "last"):
        (tmp_path / "checkpoint").mkdir(exist_ok=True)
        save_file(original(weights), tmp_path / "checkpoint" / f"{name}.safetensors")
    with pytest.raises(PlanError, match=r"last\.safetensors has weights that another file there has too: blocks\.0"):
        convert_checkpoint(tmp_path / "checkpoint", tmp_path / "model", base=base, family="causvid")


@pytest.mark.parametrize("family", ["causvid", "wan"])
def test_the_base_stays_as_it_is(family: str, base: Path, weights: Weights, tmp_path: Path) -> None:
    """Its weights are linked. One that is block-causal itself does not say how the other is streamed."""
    shutil.copytree(base, tmp_path / "base")
    (tmp_path / "base" / "stream.json").write_text("{}")
    save_file(original(weights), tmp_path / "a.safetensors")
    convert_checkpoint(tmp_path / "a.safetensors", tmp_path / "model", base=tmp_path / "base", family=family)
    assert (tmp_path / "base" / "stream.json").read_text() == "{}"
    written = tmp_path / "model" / "stream.json"
    assert written.exists() == (family == "causvid")
    assert family == "wan" or StreamConfig.load(tmp_path / "model").blocks.history == "clean"


def test_a_converted_model_is_streamed(base: Path, weights: Weights, tmp_path: Path) -> None:
    """And without converting: a folder with the original names in its transformer."""
    torch.save({"generator_ema": prefixed("model.", original(weights))}, tmp_path / "dmd.pt")
    words = ["convert", str(tmp_path / "dmd.pt"), "--to", str(tmp_path / "model"), "--base", str(base)]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    first, saved = result.stdout.strip().splitlines()
    assert first.startswith("self-forcing (generator_ema): 0.0 million weights, other parts of")
    assert (
        saved == f"saved {tmp_path / 'model'}: patchpar stream PROMPT --model {tmp_path / 'model'} --output video.mp4"
    )
    config = StreamConfig.of({**json.loads((tmp_path / "model" / "stream.json").read_text()), "height": 8, "width": 12})
    shutil.copytree(tmp_path / "model", tmp_path / "own")
    save_file(prefixed("model.", original(weights)), tmp_path / "own" / HIGH_NOISE / SAFETENSORS)
    frames = []
    for folder in (tmp_path / "model", tmp_path / "own"):
        with (
            StreamingPipeline.from_pretrained(folder, devices="cpu", config=config) as pipe,
            pipe.stream("a fox", seconds=0.5, seed=1) as stream,
        ):
            frames.append(torch.cat([chunk.frames for chunk in stream]))
    assert torch.equal(*frames)


def test_original_names_take_the_dtype_that_is_asked_for(base: Path, weights: Weights, tmp_path: Path) -> None:
    shutil.copytree(base, tmp_path / "model")
    save_file(original(weights), tmp_path / "model" / HIGH_NOISE / SAFETENSORS)
    shutil.copytree(base, tmp_path / "plain")
    save_file(weights, tmp_path / "plain" / HIGH_NOISE / SAFETENSORS)
    for dtype in (None, torch.bfloat16):
        loaded, wanted = (
            load_transformer(tmp_path / name, HIGH_NOISE, {"torch_dtype": dtype} if dtype else {}).state_dict()
            for name in ("model", "plain")
        )
        assert loaded.keys() == wanted.keys()
        for name, x in wanted.items():
            assert (loaded[name].dtype, torch.equal(loaded[name], x)) == (x.dtype, True), name


class Touch:
    """Unpickling it writes a file."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return Path.touch, (self.file,)


def test_a_pickle_with_more_than_tensors_runs_nothing(base: Path, tmp_path: Path) -> None:
    with (tmp_path / "bad.pt").open("wb") as file:
        pickle.dump({"generator_ema": Touch(tmp_path / "touched")}, file)
    torch.save({"generator_ema": Touch(tmp_path / "touched")}, tmp_path / "worse.pt")
    for name in ("bad.pt", "worse.pt"):
        with pytest.raises(PlanError, match=r"holds more than tensors") as error:
            convert_checkpoint(tmp_path / name, tmp_path / "model", base=base, family="self-forcing")
        assert "weights_only" not in str(error.value), "torch tells how it could be run"
        assert "\n" not in str(error.value)
    assert not (tmp_path / "touched").exists()
    assert not (tmp_path / "model").exists()


def test_a_pickle_of_older_versions_of_torch(base: Path, weights: Weights, tmp_path: Path) -> None:
    """Which is no zip archive, so that it cannot be mapped into memory."""
    content = {"generator_ema": prefixed("model.", original(weights))}
    torch.save(content, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    convert_checkpoint(tmp_path / "old.pt", tmp_path / "model", base=base)
    written = load_file(tmp_path / "model" / HIGH_NOISE / SAFETENSORS)
    assert all(torch.equal(written[name], weights[name]) for name in weights)


def test_a_lora_is_no_checkpoint(base: Path, tmp_path: Path) -> None:
    factors = {
        "blocks.0.self_attn.q.lora_A.weight": torch.ones(2, 24),
        "blocks.0.self_attn.q.lora_B.weight": torch.ones(24, 2),
    }
    save_file(factors, tmp_path / "plain.safetensors")
    torch.save({"generator_lora": factors}, tmp_path / "longlive.pt")
    for name in ("plain.safetensors", "longlive.pt"):
        with pytest.raises(PlanError, match=rf"{name} is a LoRA: give it with --lora, and the model's weights as the"):
            convert_checkpoint(tmp_path / name, tmp_path / "model", base=base, family="longlive")


def test_weights_that_do_not_fit_are_refused_by_name(base: Path, weights: Weights, tmp_path: Path) -> None:
    own = original(weights)
    for change, message in (
        ({**own, "audio_injector.0.weight": torch.ones(1)}, r"unexpected: audio_injector\.0\.weight"),
        ({name: x for name, x in own.items() if name != "patch_embedding.bias"}, "missing: patch_embedding.bias"),
        ({**own, "patch_embedding.bias": torch.ones(2)}, "of another shape: patch_embedding.bias"),
        ({**own, QUANTISED: own[QUANTISED].to(torch.int8)}, "of whole numbers are quantised: blocks.0.ffn.net.2.bias"),
    ):
        save_file(change, tmp_path / "a.safetensors")
        with pytest.raises(UnsupportedModel, match=message):
            convert_checkpoint(tmp_path / "a.safetensors", tmp_path / "model", base=base, family="causvid")
    assert not (tmp_path / "model").exists()


TWICE = "blocks.0.self_attn.q.weight"


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (f"model.{TWICE}", rf"{TWICE} and model\.{TWICE} are one weight: give a checkpoint that has each weight once"),
        ("blocks.0.attn1.to_q.weight", r"of blocks\.0\.(self_attn\.q|attn1\.to_q)\.weight there is another one"),
    ],
)
@pytest.mark.parametrize("is_first", [True, False])
def test_a_weight_that_has_two_names_is_refused(
    other: str, message: str, is_first: bool, base: Path, weights: Weights, tmp_path: Path
) -> None:
    """One of them would replace the other. Also where a folder with such names is loaded as it is."""
    own, twice = original(weights), {other: torch.zeros_like(weights["blocks.0.attn1.to_q.weight"])}
    torch.save({"generator": {**twice, **own} if is_first else {**own, **twice}}, tmp_path / "a.pt")
    with pytest.raises(PlanError, match=message):
        convert_checkpoint(tmp_path / "a.pt", tmp_path / "model", base=base, family="causvid")
    assert not (tmp_path / "model").exists()
    shutil.copytree(base, tmp_path / "base")
    save_file({**own, **twice}, tmp_path / "base" / HIGH_NOISE / SAFETENSORS)
    with pytest.raises(PlanError, match=message):
        load_transformer(tmp_path / "base", HIGH_NOISE, {})


def test_a_weight_that_two_files_of_a_transformer_have_is_refused(base: Path, weights: Weights, tmp_path: Path) -> None:
    shutil.copytree(base, tmp_path / "base")
    at, own = tmp_path / "base" / HIGH_NOISE, original(weights)
    save_file(own, at / SAFETENSORS)
    save_file({TWICE: own[TWICE] + 1}, at / "more.safetensors")
    with pytest.raises(PlanError, match=rf"more\.safetensors has weights that another file there has too: {TWICE}"):
        load_transformer(tmp_path / "base", HIGH_NOISE, {})


@pytest.mark.parametrize(
    ("file", "options", "message"),
    [
        ("none.pt", {}, "is no file"),
        ("plain.safetensors", {"family": "causvid", "base": "embedded"}, "scenes-unet has no transformer/config.json"),
        ("folder", {}, r"folder has no \.safetensors: give a checkpoint, or the folder that has its"),
        ("a.txt", {}, r"\.txt is no checkpoint"),
        ("a.pt", {}, "cannot be read as a checkpoint"),
        ("plain.safetensors", {}, "pass --family, one of self-forcing, causvid"),
        ("plain.safetensors", {"family": "sora"}, "family 'sora' is not known: use one of self-forcing, causvid"),
        ("list.pt", {}, "holds a list, but a checkpoint is a dictionary"),
        ("other.pt", {"family": "causvid"}, "has no weights of a transformer by name, but critic, step"),
    ],
)
def test_bad_checkpoints(file: str, options: Any, message: str, base: Path, weights: Weights, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "a.txt").write_text("x")
    (tmp_path / "a.pt").write_text("x")
    save_file(original(weights), tmp_path / "plain.safetensors")
    torch.save([torch.ones(1)], tmp_path / "list.pt")
    torch.save({"critic": {"a": torch.ones(1)}, "step": 3}, tmp_path / "other.pt")
    with pytest.raises(PlanError, match=message):
        convert_checkpoint(tmp_path / file, tmp_path / "model", **{"base": base, **options})
    with pytest.raises(PlanError, match="is there already"):
        convert_checkpoint(tmp_path / file, tmp_path, base=base)


def cached(folder: Path, cache: Path) -> dict[str, Any]:
    """Options for a loader that finds this folder in the hub's cache, as org/wan."""
    target = cache / "models--org--wan"
    shutil.copytree(folder, target / "snapshots" / ("0" * 40))
    (target / "refs").mkdir()
    (target / "refs" / "main").write_text("0" * 40)
    return {"cache_dir": str(cache), **OFFLINE}


def test_a_model_of_the_hub(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model", hears=False)
    options = cached(folder, tmp_path / "cache")
    with StreamingPipeline.from_pretrained("org/wan", devices="cpu", **options) as pipe:
        assert str(pipe.plan) == "2 steps on 1 rank (rank 0: steps 0-1, decode)"
    for kind in (StreamingPipeline, FifoStreamingPipeline):
        with pytest.raises(PlanError, match=r"'org/none' is no folder here, and as a name it could not be downloaded"):
            kind.from_pretrained("org/none", devices="cpu", **options)
    shutil.copytree(folder, tmp_path / "bare", ignore=lambda path, names: ["model_index.json"])
    bare = cached(tmp_path / "bare", tmp_path / "other")
    with pytest.raises(PlanError, match=r"org/wan has no model_index.json.*use `patchpar convert`"):
        StreamingPipeline.from_pretrained("org/wan", devices="cpu", **bare)


def test_of_the_base_no_transformer_is_fetched(
    base: Path, weights: Weights, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which has tens of gigabytes, and is replaced: of a folder that is here it need not be there either."""

    def without(name: str, *, allow_patterns: list[str], ignore_patterns: list[str], **_: Any) -> str:
        ignored = [str(path) for pattern in ignore_patterns for path in base.glob(pattern)]
        wanted = {str(path) for pattern in allow_patterns for path in base.glob(pattern)}
        assert {str(base / HIGH_NOISE / SAFETENSORS)} == wanted & {*ignored}
        shutil.copytree(base, tmp_path / "base", ignore=lambda folder, names: [*filter(_is(folder, ignored), names)])
        return str(tmp_path / "base")

    save_file(original(weights), tmp_path / "a.safetensors")
    monkeypatch.setattr("huggingface_hub.snapshot_download", without)
    for number, name in enumerate(("org/wan", tmp_path / "base")):
        target = tmp_path / f"model-{number}"
        convert_checkpoint(tmp_path / "a.safetensors", target, base=name, family="causvid")
        assert load_file(target / HIGH_NOISE / SAFETENSORS).keys() == weights.keys()
    with pytest.raises(PlanError, match=r"transformer has a config\.json but no safetensors weights"):
        StreamingPipeline.from_pretrained(tmp_path / "base", devices="cpu")


def _is(folder: str, paths: list[str]) -> Callable[[str], bool]:
    return lambda name: str(Path(folder) / name) in paths


def test_accelerators_load_bfloat16_unless_told_otherwise() -> None:
    assert with_default_dtype({}, ["cuda:0", "cuda:1"]) == {"torch_dtype": "bfloat16"}
    assert with_default_dtype({}, ["cpu"]) == {}
    assert with_default_dtype({"dtype": "float32"}, ["cuda:0"]) == {"dtype": "float32"}
