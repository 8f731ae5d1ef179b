"""LoRA, textual inversions and IP-Adapters come as safetensors only, wherever they are from."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model_state_dict
from safetensors.torch import save_file

from patchpar import ParallelPipeline, PlanError
from patchpar.errors import UnsupportedModel
from patchpar.models.adapters import READ_FILES, from_safetensors
from patchpar.models.info import NetworkInfo
from patchpar.pipeline.caller import CallController
from patchpar.pipeline.component_proxy import ComponentProxy
from patchpar.pipeline.state import PipelineState
from tests import tiny


class Trap:
    """Leaves a trace when it is unpickled."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> Any:
        return Path.touch, (self.trace,)


@pytest.fixture
def trap(tmp_path: Path) -> Path:
    """A folder with a pickle by every name that diffusers looks for."""
    folder = tmp_path / "trap"
    folder.mkdir()
    for name in ("pytorch_lora_weights.bin", "learned_embeds.bin", "other.pt", "adapter_model.bin", "model.ckpt"):
        (folder / name).write_bytes(pickle.dumps(Trap(tmp_path / "ran")))
    return folder


@pytest.fixture(scope="module")
def pipe() -> Iterator[ParallelPipeline]:
    with ParallelPipeline(tiny.build("sdxl").pipe, devices="cpu", verify=False) as found:
        yield found


METHODS = ("load_lora_weights", "load_textual_inversion", "lora_state_dict")


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("more", [{}, {"weight_name": "other.pt"}, {"use_safetensors": False}], ids=str)
@pytest.mark.parametrize("position", ["folder", "file"])
def test_no_pickle_is_read(
    pipe: ParallelPipeline, method: str, more: dict[str, Any], position: str, trap: Path, tmp_path: Path
) -> None:
    source = trap if position == "folder" else trap / "pytorch_lora_weights.bin"
    for given in (str(source), source):
        with pytest.raises(PlanError, match="pickle"):
            getattr(pipe, method)(given, **more)
    assert not (tmp_path / "ran").exists()


def test_several_places_are_all_looked_at(pipe: ParallelPipeline, trap: Path, tmp_path: Path) -> None:
    save_file({"<a>": torch.zeros(8)}, tmp_path / "a.safetensors")
    with pytest.raises(PlanError, match="pickle"):
        pipe.load_textual_inversion([tmp_path / "a.safetensors", trap / "learned_embeds.bin"])
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("method", READ_FILES)
def test_of_a_repository_of_the_hub_neither(method: str) -> None:
    """Diffusers is told so, and a pickle by its name is refused before it is fetched."""
    with pytest.raises(PlanError, match=r"a\.bin is no safetensors file"):
        from_safetensors(method, ["org/adapters"], {"weight_name": "a.bin", "subfolder": "x"})
    with pytest.raises(PlanError, match=r"b\.bin is no safetensors file"):
        from_safetensors(method, ["org/adapters"], {"weight_name": ["a.safetensors", "b.bin"]})
    reported = from_safetensors(f"unet.{method}", ["org/adapters"], {"weight_name": "a.safetensors", "subfolder": "x"})
    assert reported["use_safetensors"]


@pytest.mark.parametrize(
    "position", ["./nowhere", "/no/where.safetensors", "~/x.safetensors", Path("nowhere"), "nowhere"]
)
def test_a_path_that_leads_nowhere_is_a_sentence(pipe: ParallelPipeline, position: Any) -> None:
    with pytest.raises(PlanError, match="is no local file or folder"):
        pipe.load_lora_weights(position)


def test_a_file_that_its_folder_does_not_have(pipe: ParallelPipeline, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"has no ink\.safetensors"):
        pipe.load_lora_weights(tmp_path, weight_name="ink.safetensors")
    with pytest.raises(PlanError, match="has no weights as safetensors"):
        pipe.load_lora_weights(tmp_path)


def test_safetensors_and_what_is_in_memory_are_taken(pipe: ParallelPipeline, tmp_path: Path) -> None:
    other = tiny.build("sdxl").pipe
    other.unet.add_adapter(LoraConfig(r=2, target_modules=["to_q"], init_lora_weights=False))
    other.save_lora_weights(tmp_path, unet_lora_layers=get_peft_model_state_dict(other.unet))
    state = pipe.lora_state_dict(str(tmp_path))[0]
    for given in (str(tmp_path), tmp_path / "pytorch_lora_weights.safetensors", state):
        pipe.load_lora_weights(given, adapter_name="ink")
        assert pipe.get_active_adapters() == ["ink"]
        pipe.unload_lora_weights()


def test_networks_in_workers_read_safetensors_only(trap: Path) -> None:
    """And make no other network."""
    methods = frozenset({"load_lora_adapter", "from_pretrained", "from_single_file"})
    state: Any = SimpleNamespace(
        is_fresh=False, ask=lambda *_, **__: pytest.fail("it was asked"), _part_name_of=lambda value: None
    )
    unet: Any = ComponentProxy(
        "unet", NetworkInfo(kind="A", methods=methods), state.ask, partial(PipelineState.apply, state)
    )
    with pytest.raises(PlanError, match="pickle"):
        unet.load_lora_adapter(trap / "other.pt")
    for method in ("from_pretrained", "from_single_file"):
        with pytest.raises(UnsupportedModel, match="another network"):
            getattr(unet, method)


@pytest.mark.parametrize(
    ("method", "args", "kwargs"),
    [
        ("text_encoder.load_adapter", ("{trap}",), {}),
        ("text_encoder.load_adapter", (), {"peft_model_id": "org/adapter"}),
        ("text_encoder.load_adapter", (), {"pretrained_model_name_or_path": "{trap}", "use_safetensors": False}),
        ("from_single_file", ("{trap}/model.ckpt",), {}),
        ("from_single_file", (), {"pretrained_model_link_or_path": "https://hub/org/model/blob/main/model.bin"}),
    ],
)
def test_what_else_reads_weights(method: str, args: tuple[str, ...], kwargs: dict[str, Any], trap: Path) -> None:
    """Adapters of transformers' own, and whole pipelines out of a file."""
    args = tuple(each.format(trap=trap) for each in args)
    kwargs = {name: value.format(trap=trap) if isinstance(value, str) else value for name, value in kwargs.items()}
    with pytest.raises(PlanError, match="pickle"):
        from_safetensors(method, args, kwargs)


def test_what_else_reads_weights_takes_safetensors(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(1)}, tmp_path / "adapter_model.safetensors")
    for method, args, kwargs in (
        ("text_encoder.load_adapter", (str(tmp_path),), {"adapter_name": "a"}),
        ("text_encoder.load_adapter", (), {"adapter_state_dict": {}}),
        ("from_single_file", ("model.safetensors",), {}),
        ("from_single_file", ("model-q4.gguf",), {}),
    ):
        assert from_safetensors(method, args, kwargs) == kwargs


def test_a_callback_reads_no_pickle_either(trap: Path) -> None:
    caller = CallController(None, {}, kind="local", output_module="diffusers")
    with pytest.raises(PlanError, match="pickle"):
        caller.apply("load_lora_weights", (trap,), {})
    caller.apply("load_lora_weights", ("org/lora",), {"weight_name": "a.safetensors"})
    (change,) = caller.changes
    assert change.kwargs == {"weight_name": "a.safetensors", "use_safetensors": True}
