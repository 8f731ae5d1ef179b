"""LoRAs of a page act in the calls of its requests and in no other; what fits no model is a sentence."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model_state_dict
from safetensors.torch import load_file, save_file

from app.high_res_tab import LargeTab
from app.image_runner import ImageJobRunner
from app.image_tab import ImageTab
from app.loras import LoadedLoras, loras_of, text_of
from app.presets import presets_for
from app.requests import GenerateRequest
from app.state import AppState
from patchpar import ParallelPipeline, PlanError
from tests.tiny import build

from .app_states import state_of
from .fakes import FakePipeline, FakeWorkers
from .test_bad_input import OWNER, fields, message_of
from .test_history_panel import last_of

AUTOMATIC = presets_for(2)[0].label
REQUEST = GenerateRequest(prompt="a fox", steps=2, height=64, width=64, seed=3)


class LoraPipeline(FakePipeline):
    """Remembers what was loaded, and what acted in each call."""

    def __init__(self) -> None:
        super().__init__()
        self.changes: list[Any] = []
        self.selected: dict[str, float] = {}
        self.is_enabled, self.loaded = False, list[str]()
        self.acted: list[dict[str, float]] = []
        self.broken = ""

    @property
    def description(self) -> Any:
        methods = frozenset({"load_lora_weights"})
        return SimpleNamespace(**vars(super().description), methods=methods)

    def load_lora_weights(self, source: str, adapter_name: str, **options: Any) -> None:
        self.changes.append(("load", options.get("weight_name", source)))
        if self.broken and adapter_name.endswith(self.broken):
            raise ValueError("no such keys")
        self.loaded.append(adapter_name)

    def get_list_adapters(self) -> dict[str, list[str]]:
        return {"unet": self.loaded}

    def disable_lora(self) -> None:
        self.is_enabled = False

    def enable_lora(self) -> None:
        self.is_enabled = True

    def delete_adapters(self, name: str) -> None: ...

    def set_adapters(self, names: list[str], scales: list[float]) -> None:
        self.selected = dict(zip(names, scales, strict=True))

    def unload_lora_weights(self) -> None:
        self.changes.append("unload")
        self.selected, self.loaded = {}, []

    def __call__(self, **arguments: Any) -> Any:
        self.acted.append(dict(self.selected) if self.is_enabled else {})
        return super().__call__(**arguments)


@pytest.fixture
def pipe() -> LoraPipeline:
    return LoraPipeline()


@pytest.fixture
def state(pipe: LoraPipeline) -> Iterator[AppState]:
    workers = FakeWorkers(pipe)
    workers.may_change = True
    with closing(state_of(workers)) as found:
        yield found


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, str]:
    found = tmp_path / "ink.safetensors", tmp_path / "snow.safetensors"
    for each in found:
        each.touch()
    return str(found[0]), str(found[1])


def generate(state: AppState, *loras: Any) -> tuple[Any, ...]:
    return last_of(ImageTab(state).generate(OWNER, AUTOMATIC, "", "", False, 1, *fields(), *loras))


def test_a_folder_is_read_again_after_a_file_of_it_was_written(
    state: AppState, pipe: LoraPipeline, files: tuple[str, str]
) -> None:
    """As who trains one meanwhile does: the folder itself is not written then."""
    folder = Path(files[0]).parent
    before = folder.stat().st_mtime_ns
    for _ in range(2):
        generate(state, str(folder), 1)
    os.utime(files[1], ns=(before, before + 10**9))
    assert folder.stat().st_mtime_ns == before
    generate(state, str(folder), 1)
    assert pipe.changes == [("load", str(folder)), "unload", ("load", str(folder))]


@pytest.mark.parametrize("source", ["x" * 300, "~nobodyhere/ink.safetensors"])
def test_a_path_that_cannot_be_is_a_sentence(state: AppState, source: str) -> None:
    message = message_of(ImageTab(state).generate(OWNER, AUTOMATIC, "", "", False, 1, *fields(), source, 1))
    assert "is no valid path" in message


def test_they_act_in_calls_that_ask_for_them_and_in_no_other(
    state: AppState, pipe: LoraPipeline, files: tuple[str, str]
) -> None:
    ink, snow = files
    for loras in ((ink, 0.5), (ink, 0.8, "", 1, snow, -1), (), ("", 1), (snow, 1.0)):
        assert "done" in generate(state, *loras)[1]
    assert pipe.acted == [{"1-ink": 0.5}, {"1-ink": 0.8, "3-snow": -1.0}, {}, {}, {"1-snow": 1.0}]


def test_the_same_ones_are_loaded_once(state: AppState, pipe: LoraPipeline, files: tuple[str, str]) -> None:
    ink, _ = files
    for weight in (0.5, 0.9):
        generate(state, ink, weight)
    assert pipe.changes == [("load", "ink.safetensors")]
    assert [acting["1-ink"] for acting in pipe.acted] == [0.5, 0.9]
    Path(ink).write_bytes(b"anew")
    generate(state, ink, 0.5)
    assert pipe.changes[1:] == ["unload", ("load", "ink.safetensors")], "a file that was written again"


def test_one_that_does_not_fit_leaves_none(state: AppState, pipe: LoraPipeline, files: tuple[str, str]) -> None:
    ink, snow = files
    pipe.broken = "snow"
    message = message_of(ImageTab(state).generate(OWNER, AUTOMATIC, "", "", False, 1, *fields(), ink, 1, snow, 1))
    assert "snow.safetensors cannot be loaded: no such keys" in message
    assert pipe.calls == []
    generate(state)
    assert pipe.acted == [{}]
    assert pipe.changes[-1] == "unload"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (("no/such/file/here", 1), "is no local file or folder, and no hub name such as org/model"),
        (("tests/app/fakes.py", 1), "is no safetensors file"),
        (("org/name", None), "weight None: it is a number"),
        (("org/name", 99), "scale 99: use -10 to 10"),
    ],
)
def test_what_is_no_lora_is_refused_before_it_is_queued(values: tuple[Any, ...], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        loras_of(values)


def test_their_names_are_with_the_image(state: AppState, files: tuple[str, str]) -> None:
    ink, _ = files
    generate(state, ink, 0.8)
    assert text_of(loras_of((ink, 0.8, "", 1, "org/name", 1))) == "ink.safetensors:0.8, name:1"
    (name,) = state.history.names(OWNER)
    text = state.history.path(OWNER, name).read_bytes()
    assert b'LoRA: "ink.safetensors:0.8"' in text
    assert ink.encode() not in text
    status, *_ = ImageTab(state).history.reuse(OWNER, name)
    assert "LoRA ink.safetensors:0.8" in status
    generate(state)
    assert "LoRA" not in ImageTab(state).history.reuse(OWNER, "")[0]


def test_other_tabs_have_them_too(state: AppState, pipe: LoraPipeline, files: tuple[str, str]) -> None:
    ink, _ = files
    last_of(LargeTab(state).generate(OWNER, "", False, *fields(), ink, 0.5))
    assert pipe.acted == [{"1-ink": 0.5}]


def test_a_page_that_others_reach_takes_none(state: AppState, pipe: LoraPipeline, files: tuple[str, str]) -> None:
    state.workers.may_change = False  # type: ignore[misc]
    displayed = ImageTab(state).generate(OWNER, AUTOMATIC, "", "", False, 1, *fields(), files[0], 1)
    assert "this page takes no LoRAs" in message_of(displayed)
    assert pipe.changes == []


class TinyWorkers(FakeWorkers):
    """A real pipeline."""

    def __init__(self, pipe: Any) -> None:
        super().__init__(pipe, count=1)
        self.may_change = True


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model, adapters of it, and those of another."""
    found = tmp_path_factory.mktemp("model")
    pipe = build("sdxl").pipe
    pipe.save_pretrained(found)
    torch.manual_seed(0)
    pipe.unet.add_adapter(LoraConfig(r=4, lora_alpha=4, init_lora_weights=False, target_modules=["to_q", "to_v"]))
    pipe.save_lora_weights(found, unet_lora_layers=get_peft_model_state_dict(pipe.unet), weight_name="ink.safetensors")
    weights = load_file(found / "ink.safetensors")
    save_file({name.replace("unet", "transformer"): each for name, each in weights.items()}, found / "flux.safetensors")
    return found


def image_with(folder: Path, **loras: float) -> Any:
    """Of plain diffusers."""
    pipe = build("sdxl").pipe
    for name in loras:
        pipe.load_lora_weights(folder, weight_name=f"{name}.safetensors", adapter_name=name)
    if loras:
        pipe.set_adapters(list(loras), list(loras.values()))
    call = REQUEST.arguments(("prompt", "height", "width", "guidance_scale"))
    return np.asarray(pipe(**call).images[0]).astype(int)


@pytest.mark.parametrize("devices", ["cpu", pytest.param("cpu:2", marks=pytest.mark.breadth)])
def test_the_image_is_that_of_plain_diffusers_and_the_next_one_too(folder: Path, devices: str) -> None:
    job = SimpleNamespace(check=lambda: None, show=lambda **_: None)
    with ParallelPipeline.from_pretrained(folder, devices=devices) as pipe:
        pipe.set_progress_bar_config(disable=True)
        runner = ImageJobRunner(TinyWorkers(pipe))  # type: ignore[arg-type]
        preset = presets_for(2 if ":" in devices else 1)[0]
        runner.workers.count = 2 if ":" in devices else 1  # type: ignore[misc]

        def image(*loras: Any) -> Any:
            request = replace(REQUEST, loras=loras_of(loras))
            return np.asarray(runner.generate(job, request, preset).image).astype(int)  # type: ignore[arg-type]

        plain, inked = image_with(folder), image_with(folder, ink=2.0)
        ink = str(folder / "ink.safetensors")
        assert np.abs(inked - plain).max() > 10, "a control: it changes the image"
        assert np.abs(image(ink, 2) - inked).max() <= 1
        assert np.abs(image() - plain).max() <= 1
        if ":" in devices:
            with pytest.raises(PlanError, match=r"flux.safetensors cannot be loaded: it has no weights"):
                image(ink, 1, str(folder / "flux.safetensors"), 1)
            assert np.abs(image() - plain).max() <= 1


def test_a_model_without_loras_says_so_and_goes_on(files: tuple[str, str]) -> None:
    pipe, loaded = LoraPipeline(), LoadedLoras()
    described = SimpleNamespace(pipeline="DiTPipeline", methods=frozenset())
    bare: Any = type("Bare", (), {"description": described})()
    with pytest.raises(PlanError, match="this model, a DiTPipeline, takes no LoRAs"):
        loaded.prepare(bare, loras_of((files[0], 1)))
    loaded.prepare(bare, ())
    loaded.prepare(pipe, ())
    assert pipe.changes == []
