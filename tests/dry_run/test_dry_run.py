"""A dry run of a pipeline: the memory that a real call takes, found without weights and without computing."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.models import modeling_utils
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import T5Config, T5EncoderModel

from patchpar.errors import PlanError, UnsupportedModel
from patchpar.models.dry_run.dry_run import DECODE, DENOISE, ENCODE, dry_run, weight_bytes
from patchpar.models.dry_run.empty_pipeline import empty_network, empty_pipeline
from patchpar.models.files import embedded_model
from patchpar.models.model_index import ComponentEntry
from tests.breadth import first_of
from tests.tiny import BUILDERS, build
from tests.vae.allocations import Allocations

EXACT = 1e-3  # a tensor of a few values is made or not
"""Relative to the peak."""


T5 = T5Config(vocab_size=32, d_model=16, d_kv=4, d_ff=32, num_layers=2, num_heads=4, feed_forward_proj="gated-gelu")


def call_of(name: str) -> dict[str, Any]:
    tiny = build(name)
    takes_steps = "num_inference_steps" in inspect.signature(type(tiny.pipe).__call__).parameters
    return {**tiny.call_kwargs, "num_inference_steps": STEPS} if takes_steps else tiny.call_kwargs


DROPS_PADDING = ("qwen", "qwen_edit", "zimage")
"""Pipelines that select the tokens of the text by a mask, which is taken for all of them."""
PADDED = 1.3
ON_THE_HOST = {"skyreels_forcing": 3 * 8 * 4000}
"""Bytes that stay on the CPU of a GPU's host: a scheduler for each latent frame, with eight tables of 1,000 steps."""
STEPS = 3
"""Of the real calls: one more than those of a dry run."""


@pytest.mark.parametrize("name", first_of(BUILDERS, "sd", "flux", "wan"))
def test_the_peak_is_that_of_a_real_call(name: str) -> None:
    real, call = build(name).pipe, call_of(name)
    real.set_progress_bar_config(disable=True)
    with Allocations() as found, torch.no_grad():
        real(**call)
    dry = build(name).pipe
    dry.set_progress_bar_config(disable=True)
    run = dry_run(dry, **call_of(name))
    peak = found.peak - ON_THE_HOST.get(name, 0)
    assert run.peak_bytes >= peak * (1 - EXACT)
    assert run.peak_bytes <= peak * (PADDED if name in DROPS_PADDING else 1 + EXACT)
    assert run.calls >= 1
    assert run.flops_per_call > 0


def test_an_empty_pipeline_is_that_of_its_folder() -> None:
    """Networks of the same weights, none of which is read; the rest is loaded."""
    from patchpar.models.loading import load_pipeline, with_dtype

    folder = embedded_model("embedded")
    empty = empty_pipeline(folder, {"torch_dtype": "float16", "variant": "fp16"})
    loaded = load_pipeline(str(folder), {**with_dtype({"torch_dtype": "float16"}), "variant": "fp16"})
    assert type(empty) is type(loaded)
    assert set(empty.components) == set(loaded.components)
    for name, network in loaded.components.items():
        if isinstance(network, nn.Module):
            assert {x.device.type for x in empty.components[name].parameters()} == {"meta"}
            assert weight_bytes(empty.components[name]) == weight_bytes(network)
    assert empty.scheduler.config == loaded.scheduler.config


@pytest.mark.parametrize("name", first_of([*BUILDERS], "wan"))
def test_no_weights_are_loaded_also_of_networks_that_a_pipeline_may_lack(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as Wan's, which has one transformer or two: diffusers looks for them in the folder although it has them."""
    warnings = list[str]()
    monkeypatch.setattr(modeling_utils.logger, "warning", warnings.append)
    build(name).pipe.save_pretrained(tmp_path)
    for file in tmp_path.rglob("*.safetensors"):
        file.unlink()
    networks = [each for each in empty_pipeline(tmp_path, {}).components.values() if isinstance(each, nn.Module)]
    large = [x for network in networks for x in network.parameters() if x.numel() > 1]  # a network makes single numbers
    assert {x.device.type for x in large} == {"meta"}
    assert not warnings, "of layers that are kept in float32, which they are"


def test_steps_that_the_call_leaves_out() -> None:
    """The default of the pipeline is 50."""
    pipe = empty_pipeline(embedded_model("embedded"), {"variant": "fp16"})
    pipe.set_progress_bar_config(disable=True)
    assert dry_run(pipe, prompt="a fox").calls == 2


def test_a_size_that_this_machine_could_not_run() -> None:
    """Of 8192 x 8192 pixels nothing is computed: activations grow with the pixels, weights do not."""
    pipe = empty_pipeline(embedded_model("embedded"), {"torch_dtype": "float32", "variant": "fp16"})
    pipe.set_progress_bar_config(disable=True)
    small, large = (dry_run(pipe, prompt="a fox", height=side, width=side, output_type="pt") for side in (1024, 8192))
    assert small.weight_bytes == large.weight_bytes
    assert large.peaks[DECODE] == pytest.approx(64 * small.peaks[DECODE], rel=0.05)
    assert large.flops_per_call >= 64 * small.flops_per_call
    assert set(small.peaks) == {ENCODE, DENOISE, DECODE}


def test_flops_are_those_that_torch_counts() -> None:
    tiny, call = build("flux"), call_of("flux")
    tiny.pipe.set_progress_bar_config(disable=True)
    counter, seen = FlopCounterMode(display=False), []
    forward = tiny.denoiser.forward

    def counted(*args: Any, **kwargs: Any) -> Any:
        with counter, torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            found = forward(*args, **kwargs)
        seen.append(counter.get_total_flops())
        return found

    tiny.denoiser.forward = counted
    tiny.pipe(**call)
    assert dry_run(build("flux").pipe, **call_of("flux")).flops_per_call == pytest.approx(seen[0], rel=1e-6)


def test_what_needs_values_is_refused() -> None:
    """With the operator that cannot run, and without a trace in the pipeline."""
    pipe = build("sd").pipe
    kind = type(pipe)
    pipe.unet.register_forward_pre_hook(lambda _, args: args if torch.unique(args[0]).numel() else None)
    with pytest.raises(
        UnsupportedModel, match=r"StableDiffusionPipeline needs values that only a real call has.*unique"
    ):
        dry_run(pipe, **call_of("sd"))
    assert type(pipe) is kind


def test_a_folder_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"no model_index\.json"):
        empty_pipeline(tmp_path, {})


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("make", [lambda: build("wan").denoiser, lambda: T5EncoderModel(T5)], ids=["wan", "t5"])
def test_dtypes_are_those_of_loaded_weights(make: Any, dtype: torch.dtype, tmp_path: Path) -> None:
    """Both libraries keep some weights in float32: of T5 in float16 about a third."""
    network = make()
    network.save_pretrained(tmp_path)
    kind = type(network)
    part = ComponentEntry(name="network", library=kind.__module__.split(".")[0], kind=kind.__name__)
    empty = empty_network(tmp_path, part, dtype)
    loaded = kind.from_pretrained(tmp_path, torch_dtype=dtype)
    assert empty is not None
    assert {name: x.dtype for name, x in empty.named_parameters()} == {
        name: x.dtype for name, x in loaded.named_parameters()
    }


def test_quantized_weights_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"quantization_config": {"quant_method": "torchao"}}')
    part = ComponentEntry(name="network", library="transformers", kind="T5EncoderModel")
    with pytest.raises(UnsupportedModel, match=r"holds quantised weights"):
        empty_network(tmp_path, part, torch.float16)
