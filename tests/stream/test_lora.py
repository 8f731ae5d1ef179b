"""A LoRA merged into a transformer while it is loaded: names of PEFT, diffusers and others, scales, refusals."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import WanTransformer3DModel
from safetensors.torch import save_file
from torch import Tensor

from patchpar.errors import LaunchError, PlanError, UnsupportedModel
from patchpar.models.streaming.lora import LoraFile, merge_lora
from patchpar.stream.causal.pipeline import StreamingPipeline
from patchpar.stream.worker_group import ModelLoading
from tests.stream.test_convert import Touch
from tests.stream.tiny import transformer, write_folder
from tests.tensors import noise

RANK = 3
LAYERS = {  # diffusers' name: Wan's own
    "blocks.0.attn1.to_q": "blocks.0.self_attn.q",
    "blocks.1.attn2.to_out.0": "blocks.1.cross_attn.o",
    "blocks.1.ffn.net.0.proj": "blocks.1.ffn.0",
    "proj_out": "head.head",
}
Weights = dict[str, Tensor]


def factors(net: WanTransformer3DModel) -> dict[str, tuple[Tensor, Tensor]]:
    found = {}
    for number, name in enumerate(LAYERS):
        out, inside = net.get_submodule(name).weight.shape  # type: ignore[misc]
        found[name] = noise(RANK, inside, seed=number), noise(out, RANK, seed=50 + number)  # type: ignore[arg-type]
    return found


def named(net: WanTransformer3DModel, down: str, up: str, own: bool) -> Weights:
    found = {}
    for name, (a, b) in factors(net).items():
        module = LAYERS[name] if own else name
        found[down.format(module)], found[up.format(module)] = a, b
    return found


FORMS: dict[str, Callable[[WanTransformer3DModel], Weights]] = {
    "peft": lambda net: named(net, "base_model.model.{}.lora_A.weight", "base_model.model.{}.lora_B.weight", True),
    "peft-default": lambda net: named(net, "{}.lora_A.default.weight", "{}.lora_B.default.weight", False),
    "diffusers": lambda net: named(net, "transformer.{}.lora_A.weight", "transformer.{}.lora_B.weight", False),
    "others": lambda net: named(net, "diffusion_model.{}.lora_down.weight", "diffusion_model.{}.lora_up.weight", True),
}


def expected(net: WanTransformer3DModel, scale: float) -> Weights:
    weights = {name: x.clone() for name, x in net.state_dict().items()}
    for name, (a, b) in factors(net).items():
        weights[f"{name}.weight"] = weights[f"{name}.weight"] + scale * b @ a
    return weights


def furthest(net: WanTransformer3DModel, wanted: Weights) -> float:
    return max(float((x.float() - wanted[name]).abs().max()) for name, x in net.state_dict().items())


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_names(form: str, suffix: str, tmp_path: Path) -> None:
    net = transformer()
    wanted, weights, file = expected(net, 0.5), FORMS[form](net), tmp_path / f"lora{suffix}"
    save_file(weights, file) if suffix == ".safetensors" else torch.save({"generator_lora": weights}, file)
    assert merge_lora(net, LoraFile.of(f"{file}:0.5")) == len(LAYERS)
    assert furthest(net, wanted) < 1e-6
    assert furthest(net, expected(transformer(), 0.0)) > 0.1, "the control: it changes something"


def test_alpha_is_that_of_the_file(tmp_path: Path) -> None:
    """In the file, beside it, or in its metadata; else the rank."""
    weights = FORMS["diffusers"](transformer())
    file = tmp_path / "lora.safetensors"

    def scale() -> float:
        net = transformer()
        merge_lora(net, LoraFile.of(file))
        scales = [s for s in (1.0, 2.0, 4.0, 0.5) if furthest(net, expected(transformer(), s)) < 1e-5]
        assert len(scales) == 1
        return scales[0]

    save_file(weights, file)
    assert scale() == 1.0
    alphas = {f"transformer.{name}.alpha": torch.tensor(2.0 * RANK) for name in LAYERS}
    save_file({**weights, **alphas}, file)
    assert scale() == 2.0
    save_file(weights, file, metadata={"lora_adapter_metadata": json.dumps({"transformer.lora_alpha": 4 * RANK})})
    assert scale() == 4.0
    (tmp_path / "adapter_config.json").write_text(json.dumps({"lora_alpha": RANK / 2, "r": RANK}))
    assert scale() == 0.5
    (tmp_path / "adapter_config.json").write_text(json.dumps({"lora_alpha": 4, "use_rslora": True}))
    with pytest.raises(PlanError, match=r'this kind of LoRA is not merged here: \{"use_rslora": true\}'):
        scale()


def test_dtypes_stay(tmp_path: Path) -> None:
    net = transformer(torch.bfloat16)
    before = {name: x.dtype for name, x in net.state_dict().items()}
    save_file(FORMS["peft"](net), tmp_path / "lora.safetensors")
    merge_lora(net, LoraFile.of(tmp_path / "lora.safetensors"))
    assert {name: x.dtype for name, x in net.state_dict().items()} == before


Change = Callable[[Weights], Weights]
LAYER = "transformer.blocks.0.attn1.to_q"
WRONG: dict[str, tuple[Change, str]] = {
    "another width": (
        lambda w: {**w, f"{LAYER}.lora_A.weight": torch.ones(RANK, 7)},
        rf"{LAYER}\.lora_A\.weight, .*have shapes \(3, 7\) and \(24, 3\), but this layer takes \(rank, 24\) and",
    ),
    "another rank": (lambda w: {**w, f"{LAYER}.lora_B.weight": torch.ones(24, 2)}, r"have shapes \(3, 24\) and"),
    "no rank": (
        lambda w: ({**w, f"{LAYER}.lora_A.weight": torch.ones(0, 24), f"{LAYER}.lora_B.weight": torch.ones(24, 0)}),
        r"have shapes \(0, 24\) and \(24, 0\)",
    ),
    "another layer": (
        lambda w: (
            {**w, "transformer.blocks.9.attn1.to_q.lora_A.weight": torch.ones(1, 1)}
            | {"transformer.blocks.9.attn1.to_q.lora_B.weight": torch.ones(1, 1)}
        ),
        r"transformer\.blocks\.9\.attn1\.to_q\.lora_A\.weight belongs to no linear layer",
    ),
    "a half": (
        lambda w: {name: x for name, x in w.items() if name != f"{LAYER}.lora_B.weight"},
        f"half a LoRA: {LAYER}",
    ),
    "more": (lambda w: {**w, f"{LAYER}.lora_magnitude_vector": torch.ones(24)}, "what is no LoRA: .*magnitude_vector"),
    "no number": (
        lambda w: {**w, f"{LAYER}.alpha": torch.tensor(float("nan"))},
        rf"what is no LoRA: {LAYER}\.alpha",
    ),
    "nothing": (lambda w: {"a.alpha": torch.ones(1)}, "half a LoRA: a"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_does_not_fit_is_refused_by_name(wrong: str, tmp_path: Path) -> None:
    change, message = WRONG[wrong]
    net = transformer()
    save_file(change(FORMS["diffusers"](net)), tmp_path / "lora.safetensors")
    lora = LoraFile.of(tmp_path / "lora.safetensors")
    with pytest.raises(UnsupportedModel, match=message):
        merge_lora(net, lora)
    assert furthest(net, expected(transformer(), 0.0)) == 0, "nothing has been changed"


def test_a_lora_is_looked_at_before_a_rank_is_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which would load gigabytes first, and in a worker would die of it. The control: one that fits goes so far."""

    def start(*_: Any) -> Any:
        raise LaunchError("far enough")

    monkeypatch.setattr(ModelLoading, "start", start)
    folder, file = write_folder(tmp_path / "model"), tmp_path / "lora.safetensors"
    fits = FORMS["diffusers"](transformer())
    for content, kind, message in (
        (fits, LaunchError, "far enough"),
        ({**fits, f"{LAYER}.lora_A.weight": torch.ones(3, 7)}, UnsupportedModel, r"have shapes \(3, 7\) and"),
    ):
        save_file(content, file)
        with pytest.raises(kind, match=message):
            StreamingPipeline.from_pretrained(folder, devices="cpu:2", lora=file)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "a.pt").write_text("x")
    for text, message in (
        (tmp_path / "none.pt", r"none\.pt is no file; write PATH or PATH:0\.5"),
        (f"{tmp_path / 'a.pt'}:much", "'much' is no scale"),
        (f"{tmp_path / 'a.pt'}:inf", "'inf' is no scale"),
    ):
        with pytest.raises(PlanError, match=message):
            LoraFile.of(text)
    with pytest.raises(PlanError, match="cannot be read as a checkpoint"):
        merge_lora(transformer(), LoraFile.of(tmp_path / "a.pt"))
    torch.save({"lora_A": Touch(tmp_path / "touched")}, tmp_path / "code.pt")
    with pytest.raises(PlanError, match=r"holds more than tensors \(.*\), which could run code"):
        merge_lora(transformer(), LoraFile.of(tmp_path / "code.pt"))
    assert not (tmp_path / "touched").exists()


def test_a_stream_with_a_lora(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model", hears=False)
    net = transformer()
    save_file(FORMS["peft"](net), tmp_path / "lora.safetensors")

    def frames(**options: Any) -> Tensor:
        with (
            StreamingPipeline.from_pretrained(folder, devices="cpu", **options) as pipe,
            pipe.stream("a fox", seconds=0.2, seed=1) as stream,
        ):
            return torch.cat([chunk.frames for chunk in stream])

    whole = frames(lora=tmp_path / "lora.safetensors")
    assert not torch.equal(whole, frames())
    assert torch.equal(frames(lora=f"{tmp_path / 'lora.safetensors'}:0"), frames())
    with pytest.raises(PlanError, match="is no file; write PATH"):
        frames(lora=tmp_path / "none.safetensors")
