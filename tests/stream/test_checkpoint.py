"""Causal models are loaded by what they are, whoever wrote the folder; each rank holds what its steps need."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, WanPipeline, WanTransformer3DModel
from safetensors.torch import load_file, save_file
from torch import Tensor

from patchpar.errors import PlanError, UnsupportedModel
from patchpar.launch.inline import InlineContext
from patchpar.models.streaming.checkpoint import RequiredWeights, load_wan
from patchpar.models.streaming.config import StreamConfig
from patchpar.models.streaming.video_folder import HIGH_NOISE, LOW_NOISE, low_noise_below
from patchpar.plan.stream_plan import StreamPlan
from patchpar.stream.causal.runner import StreamRunner
from patchpar.stream.causal.wan import WanStream
from patchpar.stream.messages import StreamRun
from tests.stream.running import Script, differing, pipelined, serial
from tests.stream.tiny import COLUMNS, ROWS, STREAM, causal, stream, transformer, vae, write_folder
from tests.tiny import encoders, tokenizers

WEIGHTS = "diffusion_pytorch_model.safetensors"
SCHEDULER = {"_class_name": "SelfForcingFlowMatchScheduler", "num_inference_steps": 1000, "shift": 5.0}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("plain"), hears=False)


def change(file: Path, **facts: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | facts))


@pytest.fixture
def causal_folder(plain: Path, tmp_path: Path) -> Path:
    """As FastVideo writes them: classes that diffusers does not have, and no stream.json."""
    folder = tmp_path / "causal"
    shutil.copytree(plain, folder)
    (folder / "stream.json").unlink()
    index = json.loads((folder / "model_index.json").read_text())
    own = {"_class_name": "WanCausalDMDPipeline", "transformer": ["diffusers", "CausalWanTransformer3DModel"]}
    change(folder / "model_index.json", **own, scheduler=["diffusers", SCHEDULER["_class_name"]])
    assert index["_class_name"] == "WanPipeline"
    change(folder / "transformer" / "config.json", _class_name="CausalWanTransformer3DModel", local_attn_size=6)
    (folder / "scheduler" / "scheduler_config.json").write_text(json.dumps(SCHEDULER))
    return folder


def weights(net: Any) -> dict[str, Tensor]:
    return dict(net.state_dict())


def same(one: Any, other: Any) -> bool:
    a, b = weights(one), weights(other)
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_classes_of_others_are_the_weights_of_wan(causal_folder: Path, plain: Path) -> None:
    with pytest.raises(Exception, match=r"CausalWan|SelfForcing"):
        WanPipeline.from_pretrained(causal_folder)
    pipe = load_wan(causal_folder, RequiredWeights(text=True, vae=True), {})
    assert same(pipe.transformer, WanPipeline.from_pretrained(plain).transformer)
    assert type(pipe.transformer) is WanTransformer3DModel


def test_self_forcing_is_told_by_its_scheduler(causal_folder: Path) -> None:
    """Steps 1000, 750, 500 and 250 warped by 5; a window of 6 frames where the folder says so, of 21 otherwise."""
    config = StreamConfig.load(causal_folder)
    assert [1000 * sigma for sigma in config.sigmas] == pytest.approx([1000, 937.5, 833.333, 625, 0], abs=1e-3)
    assert (config.sampler, config.fps, config.adapt_sink) == ("renoise", 16, False)
    assert (config.blocks.frames, config.blocks.window) == (3, 2)
    change(causal_folder / "transformer" / "config.json", local_attn_size=-1)
    assert StreamConfig.load(causal_folder).blocks.window == 7
    (causal_folder / "scheduler" / "scheduler_config.json").write_text(json.dumps({"_class_name": "Other"}))
    with pytest.raises(PlanError, match=r"no stream\.json"):
        StreamConfig.load(causal_folder)


def test_a_rank_holds_what_it_needs(plain: Path) -> None:
    pipe = load_wan(plain, RequiredWeights(text=False, vae=False, transformers=()), {"torch_dtype": torch.bfloat16})
    assert (pipe.text_encoder, pipe.tokenizer, pipe.vae) == (None, None, None)
    assert (pipe.transformer.device.type, pipe.transformer.dtype) == ("meta", torch.bfloat16)


@pytest.mark.parametrize("what", ["missing", "unexpected"])
def test_weights_that_do_not_fit_are_refused_by_name(causal_folder: Path, what: str) -> None:
    file = causal_folder / "transformer" / WEIGHTS
    held = load_file(file)
    first = sorted(held)[0]
    if what == "missing":
        del held[first]
    else:
        held["audio_injector.weight"] = torch.zeros(1)
    save_file(held, file, metadata={"format": "pt"})
    named = first if what == "missing" else "audio_injector.weight"
    with pytest.raises(UnsupportedModel, match=rf"{what} keys.*{named}"):
        load_wan(causal_folder, RequiredWeights(text=False, vae=False), {})


def test_weights_of_another_shape_are_refused(plain: Path, tmp_path: Path) -> None:
    shutil.copytree(plain, tmp_path / "other")
    file = tmp_path / "other" / HIGH_NOISE / WEIGHTS
    save_file(load_file(file) | {"patch_embedding.bias": torch.zeros(3)}, file, metadata={"format": "pt"})
    with pytest.raises(UnsupportedModel, match=r"transformer cannot be loaded by diffusers: .*patch_embedding\.bias"):
        load_wan(tmp_path / "other", RequiredWeights(text=False, vae=False), {})


# --- two transformers -------------------------------------------------------------------------------------------------


def other_transformer(text_dim: int = 8) -> WanTransformer3DModel:
    """Not the weights of `transformer`."""
    net = transformer(text_dim=text_dim)
    for parameter in net.parameters():
        parameter.mul_(0.9)
    return net


@pytest.fixture(scope="module")
def of_two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, encoder = tmp_path_factory.mktemp("two"), encoders.umt5()
    WanPipeline(
        tokenizer=tokenizers.t5(),
        text_encoder=encoder,
        vae=vae(),
        scheduler=FlowMatchEulerDiscreteScheduler(),
        transformer=transformer(text_dim=encoder.config.d_model),
        transformer_2=other_transformer(encoder.config.d_model),
        boundary_ratio=0.7,
    ).save_pretrained(folder)
    (folder / "stream.json").write_text(json.dumps(STREAM))
    return folder


def stream_of_two(steps: int = 3, boundary: int = 1) -> WanStream:
    one = stream(steps, hears=False)
    low = causal(hears=False)
    for parameter in low.transformer.parameters():
        parameter.mul_(0.9)
    return WanStream(one._network, one._schedule, one._decoder, one._run, one._first, (boundary, low))


def test_a_step_is_computed_by_the_transformer_of_its_level() -> None:
    """Wan 2.2 (arXiv:2503.20314): at high noise one, at low noise the other; on ranks as in one process."""
    outcome, _ = pipelined(stream_of_two, StreamPlan.even(3, 4), Script({}, hears=False))
    assert differing(outcome, serial(stream_of_two(), {}, hears=False)) == []
    only_high, only_low = (serial(stream_of_two(boundary=b), {}, hears=False) for b in (3, 0))
    assert differing(outcome, only_high) == list(range(6))
    assert differing(outcome, only_low) == list(range(6))
    assert differing(only_high, serial(stream(3, hears=False), {}, hears=False)) == []


def test_a_rank_loads_the_transformers_of_its_steps(of_two: Path) -> None:
    """Levels 1 and 0.6, and 0.7 between the two transformers: a rank with both steps needs both, others one."""
    config = StreamConfig.load(of_two)
    assert low_noise_below(of_two) == 0.7
    engine = StreamRunner(InlineContext("cpu"))
    engine.load(str(of_two), config, StreamPlan.even(2, 1), {})
    found = [network.transformer for network in engine._networks]
    assert len(found) == 2
    assert same(found[0], load_wan(of_two, RequiredWeights(text=False, vae=False), {}).transformer)
    assert same(
        found[1], load_wan(of_two, RequiredWeights(text=False, vae=False, transformers=(LOW_NOISE,)), {}).transformer_2
    )
    assert not same(*found)
    alone = load_wan(of_two, RequiredWeights(text=False, vae=False, transformers=(LOW_NOISE,)), {})
    assert alone.transformer is None
    assert engine._model(course()).steps == 2


def course() -> StreamRun:
    return StreamRun(ranks=1, seed=1, rows=ROWS, columns=COLUMNS, first_block=0, adapt_sink=False)


def test_two_transformers_need_a_boundary(of_two: Path, tmp_path: Path) -> None:
    shutil.copytree(of_two, tmp_path / "two")
    index = tmp_path / "two" / "model_index.json"
    index.write_text(json.dumps({k: v for k, v in json.loads(index.read_text()).items() if k != "boundary_ratio"}))
    with pytest.raises(PlanError, match="no boundary_ratio"):
        low_noise_below(tmp_path / "two")


def test_what_cannot_be_read(tmp_path: Path, plain: Path) -> None:
    with pytest.raises(PlanError, match="folder of a WanPipeline"):
        load_wan(tmp_path, RequiredWeights(text=False, vae=False), {})
    shutil.copytree(plain, tmp_path / "other")
    change(tmp_path / "other" / "model_index.json", vae=["diffusers", "AutoencoderKL"])
    with pytest.raises(UnsupportedModel, match="AutoencoderKL cannot decode block by block"):
        load_wan(tmp_path / "other", RequiredWeights(text=False, vae=False), {})
    shutil.rmtree(tmp_path / "other" / HIGH_NOISE)
    change(tmp_path / "other" / "model_index.json", vae=["diffusers", "AutoencoderKLWan"])
    with pytest.raises(PlanError, match=r"no transformer/config\.json"):
        load_wan(tmp_path / "other", RequiredWeights(text=False, vae=False), {})
