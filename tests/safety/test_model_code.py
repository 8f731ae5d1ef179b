"""Code that comes with a model is not run, whatever version of diffusers is here: refused before anything is loaded."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import pytest

from patchpar import ImageStreamingPipeline, ParallelPipeline, PlanError
from patchpar.models.files import embedded_model, resolve_model
from patchpar.models.loading import load_pipeline
from patchpar.models.remote_code import refuse_code
from tests.stream.tiny import write_folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy that tests may change, of links to what they do not."""
    folder = tmp_path_factory.mktemp("model")
    shutil.copytree(embedded_model(), folder, dirs_exist_ok=True, copy_function=lambda a, b: Path(b).symlink_to(a))
    for file in folder.rglob("*.json"):
        text = file.read_text()
        file.unlink()
        file.write_text(text)
    return folder


@pytest.fixture
def hostile(model: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(model, tmp_path / "model", symlinks=True))


def change(file: Path, **facts: Any) -> None:
    file.write_text(json.dumps({**(json.loads(file.read_text()) if file.exists() else {}), **facts}))


def payload(file: Path, *, kind: str, base: str) -> None:
    """Python that leaves a trace when it is run."""
    file.write_text(
        f"from pathlib import Path\nPath({str(file.parent / 'ran')!r}).touch()\n"
        f"import diffusers, transformers\nclass {kind}({base}): pass\n"
    )


def own_pipeline(folder: Path) -> None:
    payload(folder / "pipeline.py", kind="Mine", base="diffusers.StableDiffusionXLPipeline")
    change(folder / "model_index.json", _class_name=["pipeline", "Mine"])


def pipeline_named_none(folder: Path) -> None:
    payload(folder / "None.py", kind="Mine", base="diffusers.StableDiffusionXLPipeline")


def own_module(folder: Path) -> None:
    payload(folder / "unet" / "mine.py", kind="Mine", base="diffusers.UNet2DConditionModel")
    change(folder / "model_index.json", unet=["mine", "Mine"])


def module_named_as_a_library(folder: Path) -> None:
    """diffusers looks for `unet/diffusers.py` before it takes itself."""
    payload(folder / "unet" / "diffusers.py", kind="UNet2DConditionModel", base="object")


def other_library(folder: Path) -> None:
    """Any module that can be imported is one that may do something when it is."""
    change(folder / "model_index.json", unet=["antigravity", "fly"])


def library_of_a_path(folder: Path) -> None:
    change(folder / "model_index.json", unet=["os.path", "join"])


def own_tokenizer(folder: Path) -> None:
    payload(folder / "tokenizer" / "words.py", kind="Words", base="transformers.CLIPTokenizer")
    change(folder / "tokenizer" / "tokenizer_config.json", auto_map={"AutoTokenizer": ["words.Words", None]})
    change(folder / "model_index.json", tokenizer=["transformers", "AutoTokenizer"])


def own_network(folder: Path) -> None:
    payload(folder / "text_encoder" / "reads.py", kind="Reads", base="transformers.CLIPTextModel")
    change(folder / "text_encoder" / "config.json", auto_map={"AutoModel": "reads.Reads"})
    change(folder / "model_index.json", text_encoder=["transformers", "AutoModel"])


def pipeline_in_the_pipeline(folder: Path) -> None:
    change(folder / "unet" / "model_index.json", _class_name=["pipeline", "Mine"])
    payload(folder / "unet" / "pipeline.py", kind="Mine", base="diffusers.DiffusionPipeline")
    change(folder / "model_index.json", unet=["diffusers", "DiffusionPipeline"])


def attention_of_the_hub(folder: Path) -> None:
    change(folder / "text_encoder" / "config.json", _attn_implementation="somebody/kernels")


def attention_of_the_hub_within(folder: Path) -> None:
    """Networks of several parts have a configuration for each."""
    change(folder / "text_encoder" / "config.json", text_config={"attn_implementation": "somebody/kernels"})


def attention_of_the_hub_by_part(folder: Path) -> None:
    change(folder / "text_encoder" / "config.json", _attn_implementation={"text_config": "somebody/kernels"})


def attention_of_the_hub_in_an_attribute(folder: Path) -> None:
    """transformers 5.0 sets whatever a file says, also what holds the value of the property."""
    change(folder / "text_encoder" / "config.json", _attn_implementation_internal="somebody/kernels")


def attention_of_the_hub_in_a_list(folder: Path) -> None:
    change(folder / "text_encoder" / "config.json", parts=[{"attn_implementation": "somebody/kernels"}])


def configuration_from_another_file(folder: Path) -> None:
    """transformers reads that one instead, by its own version."""
    change(folder / "text_encoder" / "config.json", configuration_files=["config.4.0.0.json"])
    change(folder / "text_encoder" / "config.4.0.0.json", _attn_implementation="somebody/kernels")


def own_processor(folder: Path) -> None:
    """transformers looks up the parts of one, whatever class the index names."""
    (folder / "processor").mkdir()
    payload(folder / "processor" / "views.py", kind="Views", base="transformers.BaseVideoProcessor")
    change(folder / "processor" / "video_preprocessor_config.json", auto_map={"AutoVideoProcessor": "views.Views"})
    change(folder / "model_index.json", processor=["transformers", "Qwen2VLProcessor"])


def adapter_from_elsewhere(folder: Path) -> None:
    change(folder / "text_encoder" / "adapter_config.json", base_model_name_or_path="somebody/else")


WAYS: list[Callable[[Path], None]] = [
    own_pipeline,
    pipeline_named_none,
    own_module,
    module_named_as_a_library,
    other_library,
    library_of_a_path,
    own_tokenizer,
    own_network,
    pipeline_in_the_pipeline,
    attention_of_the_hub,
    attention_of_the_hub_within,
    attention_of_the_hub_by_part,
    attention_of_the_hub_in_an_attribute,
    attention_of_the_hub_in_a_list,
    configuration_from_another_file,
    own_processor,
    adapter_from_elsewhere,
]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_it_is_refused_before_anything_is_loaded(way: Callable[[Path], None], hostile: Path) -> None:
    """By the caller before ranks start, and by every rank before diffusers sees the folder."""
    way(hostile)
    for load in (
        lambda: ParallelPipeline.from_pretrained(hostile, devices="cpu", variant="fp16"),
        lambda: ImageStreamingPipeline.from_pretrained(hostile, devices="cpu", variant="fp16"),
        lambda: load_pipeline(str(hostile), {"variant": "fp16"}),
    ):
        with pytest.raises(PlanError, match=r"code that comes with a model is not run|loaded from elsewhere"):
            load()
    assert not list(hostile.rglob("ran"))


def test_what_is_shipped_has_no_code(model: Path) -> None:
    """What the check has nothing to say of: the folder as it is, and every model in the package."""
    for folder in (model, *map(embedded_model, ("embedded", "embedded-dit", "embedded-face"))):
        refuse_code(folder, {})


def test_who_trusts_it_says_so_by_name(hostile: Path) -> None:
    own_module(hostile)
    refuse_code(hostile, {"trust_remote_code": True})
    with pytest.raises(PlanError):
        refuse_code(hostile, {"trust_remote_code": False})


NAMED: dict[str, dict[str, Any]] = {
    "nothing": {},
    "trust": {"trust_remote_code": True},
    "pipeline": {"custom_pipeline": "somebody/pipeline"},
    "both": {"trust_remote_code": True, "custom_pipeline": "somebody/pipeline"},
}


class Reached(PlanError):
    """diffusers has been called."""


@pytest.mark.parametrize("pipeline", [ParallelPipeline, ImageStreamingPipeline])
@pytest.mark.parametrize("named", NAMED)
def test_what_is_named_reaches_diffusers_and_nothing_else_does(
    named: str, pipeline: Any, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    passed: list[dict[str, Any]] = []

    def load(folder: str, **options: Any) -> None:
        passed.append({name: options[name] for name in ("trust_remote_code", "custom_pipeline") if name in options})
        raise Reached

    monkeypatch.setattr(diffusers.DiffusionPipeline, "from_pretrained", load)
    with pytest.raises(Reached):
        pipeline.from_pretrained(model, devices="cpu", variant="fp16", **NAMED[named])
    assert passed == [NAMED[named]]


@pytest.mark.parametrize("named", NAMED)
def test_what_is_named_reaches_the_download_too(named: str, model: Path) -> None:
    passed: list[dict[str, Any]] = []

    class Hub:
        @staticmethod
        def download(name: str, **options: Any) -> str:
            passed.append({each: options[each] for each in ("trust_remote_code", "custom_pipeline") if each in options})
            return str(model)

        @staticmethod
        def from_pretrained(folder: str, **options: Any) -> None:
            raise Reached

    with pytest.raises(Reached):
        load_pipeline("somebody/model", NAMED[named], kind=Hub)
    assert passed == [NAMED[named]]


def test_a_pipeline_that_is_named_and_trusted_is_run(model: Path, tmp_path: Path) -> None:
    """Diffusers takes a file of a folder for the class of the pipeline."""
    payload(tmp_path / "pipeline.py", kind="Mine", base="diffusers.StableDiffusionXLPipeline")
    named = {"custom_pipeline": str(tmp_path), "trust_remote_code": True}
    with ParallelPipeline.from_pretrained(model, devices="cpu", variant="fp16", **named) as pipe:
        assert pipe.description.pipeline == "Mine"
    assert (tmp_path / "ran").exists()


def test_a_part_that_is_handed_over_is_not_looked_at(hostile: Path) -> None:
    own_module(hostile)
    refuse_code(hostile, {"unet": object()})


def test_a_module_of_a_pipeline_of_diffusers_is_one_of_its_own(hostile: Path) -> None:
    entry = ["stable_diffusion", "StableDiffusionSafetyChecker"]
    change(hostile / "model_index.json", safety_checker=entry)
    refuse_code(hostile, {})


def test_streams_bring_their_own_transformer(tmp_path: Path) -> None:
    """Causal models name classes of other programs for what streams load themselves; a decoder of their own is none."""
    folder = write_folder(tmp_path / "m")
    change(folder / "model_index.json", transformer=["fastvideo", "CausalWanTransformer3DModel"])
    with pytest.raises(PlanError, match="fastvideo"):
        resolve_model(folder, {})
    from patchpar.models.streaming.stream_folder import StreamFolder

    assert StreamFolder.read(folder).path == str(folder)
    change(folder / "model_index.json", vae=["fastvideo", "AutoencoderKLWan"])
    with pytest.raises(PlanError, match="fastvideo"):
        StreamFolder.read(folder)


def cached(folder: Path, cache: Path) -> None:
    """As the hub's cache has a repository that was fetched before."""
    repository = cache / "models--somebody--model"
    shutil.copytree(folder, repository / "snapshots" / ("0" * 40), symlinks=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0" * 40)


@pytest.mark.parametrize("way", [own_module, own_pipeline, other_library], ids=lambda way: way.__name__)
def test_repositories_of_the_hub_are_looked_at_as_folders_are(
    way: Callable[[Path], None], hostile: Path, tmp_path: Path
) -> None:
    options = {"variant": "fp16", "cache_dir": str(tmp_path), "local_files_only": True}
    way(hostile)
    cached(hostile, tmp_path)
    with pytest.raises(PlanError, match="code that comes with a model is not run"):
        load_pipeline("somebody/model", options)
    assert not list(tmp_path.rglob("ran"))


def test_a_repository_without_code_is_loaded(model: Path, tmp_path: Path) -> None:
    cached(model, tmp_path)
    options = {"variant": "fp16", "cache_dir": str(tmp_path), "local_files_only": True}
    assert isinstance(load_pipeline("somebody/model", options), diffusers.StableDiffusionXLPipeline)
    with pytest.raises(PlanError, match=r"'somebody/other' is no folder here, and as a name it could not be"):
        load_pipeline("somebody/other", options)


def shards_of_another_kind(folder: Path) -> None:
    change(folder / "text_encoder" / "model.safetensors.index.json", weight_map={"a": "pytorch_model.bin"})


def weights_of_another_name(folder: Path) -> None:
    """transformers takes what a configuration names before it looks for safetensors."""
    change(folder / "text_encoder" / "config.json", transformers_weights="adapter_model.bin")


@pytest.mark.parametrize("way", [shards_of_another_kind, weights_of_another_name], ids=lambda way: way.__name__)
def test_weights_lead_to_no_pickle(way: Callable[[Path], None], hostile: Path, tmp_path: Path) -> None:
    """In a folder, and in a repository of which somebody else has fetched more than its safetensors."""
    way(hostile)
    cached(hostile, tmp_path)
    hub = {"variant": "fp16", "cache_dir": str(tmp_path), "local_files_only": True}
    for load in (
        lambda: ParallelPipeline.from_pretrained(hostile, devices="cpu", variant="fp16"),
        lambda: load_pipeline(str(hostile), {"variant": "fp16"}),
        lambda: load_pipeline("somebody/model", hub),
    ):
        with pytest.raises(PlanError, match=r"names '\w+\.bin', which is no safetensors file of this folder"):
            load()


def test_a_model_that_names_others_is_refused(hostile: Path) -> None:
    """diffusers would load those of its README.md, from wherever, and look at nothing."""
    card = hostile / "README.md"
    card.write_text("---\nprior:\n- somebody/model\n---\n")
    refuse_code(hostile, {})
    with pytest.raises(PlanError, match=r"also loads what .*README\.md names"):
        refuse_code(hostile, {"load_connected_pipeline": True})
    change(hostile / "model_index.json", _class_name="KandinskyV22CombinedPipeline")
    with pytest.raises(PlanError, match=r"also loads what .*README\.md names"):
        refuse_code(hostile, {})
    card.unlink()
    refuse_code(hostile, {})


def test_every_class_of_diffusers_that_names_others_says_so_in_its_name() -> None:
    texts = (file.read_text() for file in (Path(diffusers.__file__).parent / "pipelines").rglob("*.py"))
    classes = [each for text in texts for each in re.split(r"^class ", text, flags=re.MULTILINE)[1:]]
    found = [each.partition("(")[0] for each in classes if "_load_connected_pipes = True" in each]
    assert found
    assert all("Combined" in name for name in found), found
