"""Blocks of Python that need a download, GPUs or a camera run as well: line by line, on tiny models in their place."""

from __future__ import annotations

import copy
import sys
from functools import wraps
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers import FluxTransformer2DModel, StableDiffusion3Pipeline, StableDiffusionXLPipeline
from peft import LoraConfig, get_peft_model_state_dict
from PIL import Image
from safetensors.torch import save_file

import patchpar
from patchpar import (
    FifoConfig,
    FifoOptions,
    FifoStreamingPipeline,
    ImageStreamingPipeline,
    ParallelPipeline,
    Plan,
    PlanError,
    StreamingPipeline,
)
from patchpar.pipeline.validate import bind, check_call, check_plan_for
from tests import tiny
from tests.stream.tiny import COLUMNS, ROWS, TEXT, write_folder
from tests.test_readme import PAGES, REPOSITORY, RUNNABLE, name, python_blocks

BLOCKS = [(page, number) for page in PAGES for number in range(len(python_blocks(page, runnable=False)))]
NEED_RANKS = ("parallel-vae", "structure-guidance", "jobs")
"""Pages whose blocks name ranks or what they exchange, or open other pipelines: only with workers are they right."""
WITH_WORKERS = [
    page
    for page in RUNNABLE
    if page.stem not in NEED_RANKS and "devices=" in "".join(python_blocks(page, runnable=True))
]
FAMILIES = {"black-forest-labs/FLUX.1-dev": "flux"}
"""Models whose place no tiny SDXL can take."""
SMALL = {"height": 64, "width": 64, "num_inference_steps": 2}
DISPLAYED = 2  # chunks of a stream that has no end by itself
QUEUE = FifoOptions(window=4, partitions=2, first_steps=2)


class Opened(ParallelPipeline):
    """Opens a tiny pipeline in this process, whichever it is asked for; draws what its plan could draw, and small."""

    asked: Any = "auto"

    def __init__(self, pipe: Any, **options: Any) -> None:
        type(self).asked = options.get("plan", "auto")
        super().__init__(pipe, devices="cpu", verify=False)
        self.set_progress_bar_config(disable=True)

    @classmethod
    def from_pretrained(cls, model: Any, **options: Any) -> Any:
        assert set(options) <= {"devices", "plan", "torch_dtype", "variant", "graphs", "secret_file", "transformer"}, (
            options
        )
        return cls(tiny.build(FAMILIES.get(model, "sdxl")).pipe, **options)

    def __call__(self, *args: Any, **arguments: Any) -> Any:
        bound = bind(self.description, args, arguments)
        check_call(self.description, bound)
        if self.asked != "auto":
            plan = self.asked if isinstance(self.asked, Plan) else Plan.parse(self.asked)
            check_plan_for(self.description, plan, bound)
        return super().__call__(*args, **(arguments | SMALL))


class Showing:
    """What stands for a reader's own `show`: takes a few images and then ends their stream."""

    def __init__(self, names: dict[str, Any]) -> None:
        self.names, self.displayed = names, 0

    def __call__(self, *_: Any) -> None:
        self.displayed += 1
        if self.displayed == DISPLAYED:
            session = self.names["session"]
            (getattr(session, "stop", None) or session.close)()


def streaming(folder: Path, real: Any, **wanted: Any) -> Any:
    """Stands for a class of streams: opens the tiny model in `folder` in this process."""

    class Stream(real):  # type: ignore[misc]
        @classmethod
        def from_pretrained(cls, model: Any, **options: Any) -> Any:
            return real.from_pretrained(folder, **{**options, "devices": "cpu", **wanted})

    return Stream


def write_adapters(folder: Path) -> None:
    """LoRAs and a textual inversion by the names that the pages use."""
    folder.mkdir(parents=True)
    encoders = {"clip_l": tiny.build("sdxl").pipe.text_encoder, "clip_g": tiny.build("sdxl").pipe.text_encoder_2}
    vectors = {name: torch.zeros(1, each.config.hidden_size) for name, each in encoders.items()}
    save_file(vectors, folder / "fox.safetensors")
    for weights in ("ink", "snow"):
        pipe = tiny.build("sdxl").pipe
        pipe.unet.add_adapter(LoraConfig(r=2, target_modules=["to_q", "to_v"], init_lora_weights=False))
        layers = get_peft_model_state_dict(pipe.unet)
        pipe.save_lora_weights(folder, unet_lora_layers=layers, weight_name=f"{weights}.safetensors")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Tiny models, written once."""
    face = write_folder(tmp_path_factory.mktemp("face"))
    images = tmp_path_factory.mktemp("pictures")
    pipe = tiny.build("sd_img2img").pipe
    pipe.register_modules(safety_checker=None, feature_extractor=None)  # which need files of their own
    pipe.save_pretrained(images)
    return {"face": face, "pictures": images}


def small(generate: Any) -> Any:
    """A call of diffusers' own pipelines, of a small image in few steps whatever the page asks for."""

    @wraps(generate)
    def generated(self: Any, *args: Any, **arguments: Any) -> Any:
        return generate(self, *args, **(arguments | SMALL))

    return generated


@pytest.fixture
def names(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    """What a reader of the pages has: models that are tiny here, a face, sound, frames."""
    fifo = FifoConfig(fps=20, height=2 * ROWS, width=2 * COLUMNS, queue=QUEUE, text_tokens=TEXT)
    control = tiny.build("sdxl_controlnet").pipe
    control.tokenizer, control.tokenizer_2 = (copy.deepcopy(control.tokenizer) for _ in range(2))  # as those of the hub
    for plain in (StableDiffusionXLPipeline, StableDiffusion3Pipeline):
        monkeypatch.setattr(plain, "__call__", small(plain.__call__))
    monkeypatch.setattr(StableDiffusionXLPipeline, "from_single_file", lambda *_, **__: tiny.build("sdxl").pipe)
    monkeypatch.setattr(
        FluxTransformer2DModel, "from_single_file", lambda *_, **__: tiny.build("flux").pipe.transformer
    )
    monkeypatch.setattr(patchpar, "ParallelPipeline", Opened)
    monkeypatch.setattr(patchpar, "StreamingPipeline", streaming(folders["face"], StreamingPipeline))
    monkeypatch.setattr(
        patchpar, "FifoStreamingPipeline", streaming(folders["face"], FifoStreamingPipeline, config=fifo)
    )
    monkeypatch.setattr(patchpar, "ImageStreamingPipeline", streaming(folders["pictures"], ImageStreamingPipeline))
    monkeypatch.setattr(type(control.controlnet), "from_pretrained", lambda *_, **__: control.controlnet)
    monkeypatch.setattr(type(control), "from_pretrained", lambda *_, **__: control)
    frames = [Image.new("RGB", (64, 64), (shade, 90, 40)) for shade in (60, 180)]
    face = Image.new("RGB", (2 * COLUMNS, 2 * ROWS), (200, 150, 120))
    found: dict[str, Any] = {"face": face, "samples": torch.zeros(16000).numpy(), "edges": frames[0]}
    return found | {"frames": frames, "frame": frames[0], "show": Showing(found)}


def script_of(page: Path, number: int) -> str:
    """A block, after those above it if it uses a pipeline of theirs. A tiny model has no GPU to come and go from."""
    blocks = python_blocks(page, runnable=False)[: number + 1]
    own = blocks[-1]
    goes_on = "pipe." in own and "pipe =" not in own and "as pipe" not in own
    return ("\n".join(blocks) if goes_on else own).replace('torch.device("cuda")', 'torch.device("cpu")')


class RayServe:
    """Stand-in for ray.serve: a deployment is made in this process, and gets no requests."""

    @staticmethod
    def deployment(**_: Any) -> Any:
        def decorate(kind: Any) -> Any:
            kind.bind = classmethod(lambda made, *args: made(*args))
            return kind

        return decorate

    @staticmethod
    def run(made: Any, *, blocking: bool) -> None:
        assert callable(made)
        assert blocking


@pytest.mark.usefixtures("group_offload")
@pytest.mark.parametrize(("page", "number"), BLOCKS, ids=lambda value: name(value) if isinstance(value, Path) else "")
def test_it_runs(
    names: dict[str, Any], page: Path, number: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    block = script_of(page, number)
    monkeypatch.chdir(REPOSITORY if '"assets/' in block else tmp_path)
    if "path/to/loras" in block:
        write_adapters(tmp_path / "path" / "to" / "loras")
    if "from ray import serve" in block:  # which is in ray[serve]
        monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(serve=RayServe))
    names["show"].names = names
    exec(compile(block, f"{name(page)}, block {number}", "exec"), names)
    assert bool(names["show"].displayed) == ("show(" in block)


@pytest.mark.parametrize("page", WITH_WORKERS, ids=name)
def test_pages_that_start_workers_run_without_them(
    names: dict[str, Any], page: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As they are, with workers and the embedded model, they run in the long suite."""
    monkeypatch.chdir(tmp_path)
    exec(compile("\n".join(python_blocks(page, runnable=True)), name(page), "exec"), names)


def test_a_block_that_could_not_run_would_be_seen(names: dict[str, Any]) -> None:
    """The plan is asked what the real one would be asked."""
    for wrong in ('"a fox", heigth=64', '"a fox", height=100', '"a fox", height=2048, guidance_scale=1.0'):
        block = f"from patchpar import *\npipe = ParallelPipeline.from_pretrained('x', plan=Plan(cfg=2))\npipe({wrong})"
        with pytest.raises((TypeError, PlanError)):
            exec(block, names)
