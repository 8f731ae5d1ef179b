"""What we put in comes out again: outputs bit-equal to the untouched pipeline, and the user's own object untouched."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from patchpar import ParallelPipeline
from tests.tiny import build

from .conftest import EXACT, QUICK, Hold, generator, relative_error, tensor_of

CALL = {**QUICK, "output_type": "latent"}


def traces(pipe: Any) -> list[str]:
    """Everything about the networks of a pipeline that hooks change."""
    networks = {name: part for name, part in pipe.components.items() if isinstance(part, nn.Module)}
    return [
        f"{name}.{path} {type(module)} {sorted(vars(module))} {len(module._forward_pre_hooks)} {module.training}"
        for name, network in networks.items()
        for path, module in network.named_modules()
    ]


@pytest.mark.parametrize("plan", ["cfg=2", "patch=2"])
def test_restore_leaves_the_plain_pipeline(parallel: ParallelPipeline, plain: Any, plan: str) -> None:
    want = plain(**CALL, generator=generator())
    parallel.plan = plan
    split = parallel(**CALL, generator=generator())
    parallel.restore()
    again = parallel(**CALL, generator=generator())
    assert str(parallel.plan) == "single"
    assert torch.equal(tensor_of(again), tensor_of(want))
    assert relative_error(split, want) <= EXACT
    parallel.plan = plan
    assert relative_error(parallel(**CALL, generator=generator()), want) <= EXACT
    assert parallel.last_run is not None
    assert max(parallel.last_run.bytes_per_step) > 0


def test_a_model_is_freed_with_its_last_name() -> None:
    """Of the one device that a call runs on, without the garbage collector; of workers launch/test_wire.py shows it."""
    plain = build("sdxl").pipe
    freed = [weakref.ref(part) for part in plain.components.values() if isinstance(part, nn.Module)]
    with ParallelPipeline(plain, devices=1) as pipe:
        pipe.set_progress_bar_config(disable=True)
        pipe(**CALL, generator=generator())
        gc.collect()
        gc.disable()
    try:
        del pipe, plain
        assert [each() for each in freed] == [None] * len(freed)
    finally:
        gc.enable()


def test_one_device_is_the_pipeline_itself(plain: Any) -> None:
    want = plain(**CALL, generator=generator())
    before = traces(plain)
    with ParallelPipeline(plain, devices=1) as pipe:
        pipe.set_progress_bar_config(disable=True)
        got = pipe(**CALL, generator=generator())
        assert torch.equal(tensor_of(got), tensor_of(want))
        assert pipe.unet is plain.unet
        assert str(pipe.plan) == "single"
        assert pipe.last_run is not None
        assert pipe.last_run.bytes_per_step == (0,)
        assert "one device" in pipe.explain()
        torch.manual_seed(3)
        first, after = tensor_of(pipe(**CALL)), torch.rand(1)
        torch.manual_seed(3)
        assert torch.equal(first, tensor_of(plain(**CALL)))
        assert torch.equal(after, torch.rand(1))
        seen: list[Any] = []
        pipe.on_step = lambda step, total: seen.append((step, total))
        pipe(**CALL, callback_on_step_end=lambda inner, step, timestep, tensors: seen.append(inner) or tensors)
        assert seen == [(1, 2), plain, (2, 2), plain]
    assert traces(plain) == before
    assert torch.equal(tensor_of(plain(**CALL, generator=generator())), tensor_of(want))


@pytest.mark.breadth
def test_a_pipeline_in_memory_on_three_devices(hold: Hold, capfd: pytest.CaptureFixture[str]) -> None:
    """Workers have copies: the user's own object stays what it was, also when they are gone."""
    own = build("sdxl").pipe
    own.set_progress_bar_config(disable=True)
    want = own(**CALL, generator=generator())
    before = traces(own)
    with ParallelPipeline(own, devices=["cpu"] * 3) as pipe:
        tall = {**CALL, "height": 192}  # six bands of two rows: three ranks help
        capfd.readouterr()
        got = pipe(**tall, generator=generator())
        assert "it/s" not in capfd.readouterr().err
        pipe.set_progress_bar_config(desc="drawing")
        pipe(**tall, generator=generator())
        assert "drawing" in capfd.readouterr().err
        pipe.set_progress_bar_config(disable=True)
        assert str(pipe.plan) == "patch=3,strategy=exact"
        assert "3 is odd" in pipe.explain()
        assert relative_error(got, own(**tall, generator=generator())) <= EXACT
        got = pipe(**CALL, generator=generator())
        assert str(pipe.plan) == "cfg=2"
        assert "1 of 3 devices idle" in pipe.explain()
        assert relative_error(got, want) <= EXACT
        assert pipe.last_run is not None
        assert len(pipe.last_run.bytes_per_step) == 2
        with pytest.raises(ValueError, match=r"num_images_per_prompt|generator"):  # also where a rank is idle
            pipe(**CALL, generator=[generator()] * 3)
        pipe.scheduler = own.scheduler  # idle ranks follow too
        pipe.plan = "patch=3"
        assert relative_error(pipe(**tall, generator=generator()), own(**tall, generator=generator())) <= EXACT
    assert traces(own) == before
    assert torch.equal(tensor_of(own(**CALL, generator=generator())), tensor_of(want))


def test_a_transformer_splits_guidance_and_without_it_tokens(hold: Hold) -> None:
    tiny = build("qwen")
    call = {**tiny.call_kwargs, "num_inference_steps": 2, "output_type": "latent"}
    want = tiny.pipe(**call, generator=generator())
    with hold(tiny.pipe) as parallel:
        got = parallel(**call, generator=generator())
        assert str(parallel.plan) == "cfg=2"
        assert torch.equal(tensor_of(got), tensor_of(want))
        unguided = {**call, "negative_prompt": None}
        alone = parallel(**unguided, generator=generator())
        assert str(parallel.plan) == "patch=2,strategy=exact"
        assert "tokens split in 2" in parallel.explain()
        assert relative_error(alone, tiny.pipe(**unguided, generator=generator())) <= EXACT
