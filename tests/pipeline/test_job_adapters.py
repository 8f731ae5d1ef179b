"""Adapters of one job alone: its image is that of plain diffusers with these, and the next call has its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from patchpar import ParallelPipeline, PlanError
from patchpar.pipeline.failed_methods import done_or_undone
from tests.breadth import first_of
from tests.tiny import build

from .conftest import EXACT, QUICK, generator, relative_error

CALL = {**QUICK, "num_inference_steps": 1, "output_type": "latent"}
SECONDS = 120.0


@pytest.mark.parametrize("plan", first_of(["cfg=2", "patch=2"], "cfg=2"))  # bands with adapters are in exact/
def test_adapters_of_a_job(reloaded: ParallelPipeline, loras: Path, plan: str) -> None:
    parallel, plain = reloaded, build("sdxl").pipe
    for pipe in (parallel, plain):
        for name in ("ink", "snow"):
            pipe.load_lora_weights(loras, weight_name=f"{name}.safetensors", adapter_name=name)
        pipe.set_adapters("snow")
    try:
        before = plain(**CALL, generator=generator())
        for adapters in ({"ink": 0.7}, {}, {"ink": 0.4, "snow": 0.9}):
            plain.enable_lora()
            if adapters:
                plain.set_adapters(list(adapters), list(adapters.values()))
            else:
                plain.disable_lora()
            want = plain(**CALL, generator=generator())
            job = parallel.submit(**CALL, ranks=(0, 1), plan=plan, adapters=adapters, generator=generator())
            assert relative_error(job.result(SECONDS), want) <= EXACT
            assert relative_error(before, want) > 100 * EXACT
        assert parallel.get_active_adapters() == ["snow"]
        assert relative_error(parallel(**CALL, generator=generator()), before) <= EXACT
        with pytest.raises(PlanError, match="'oil' is not loaded; there are ink, snow"):
            parallel.submit(**CALL, adapters={"oil": 1.0}).result(SECONDS)
    finally:
        parallel.unload_lora_weights()


def test_a_lora_that_is_loaded_in_part_leaves_nothing(loras: Path) -> None:
    """Also those that acted before act again; a control keeps the part."""
    pipe = build("sdxl").pipe
    pipe.load_lora_weights(loras, weight_name="ink.safetensors", adapter_name="ink")
    pipe.set_adapters("ink", 0.5)
    before = pipe(**CALL, generator=generator())

    def half() -> None:
        pipe.load_lora_weights(loras, weight_name="snow.safetensors", adapter_name="snow")
        raise ValueError("the part of another network does not fit")

    with pytest.raises(ValueError, match="does not fit"):
        done_or_undone(pipe, "load_lora_weights", half)
    assert pipe.get_list_adapters() == {"unet": ["ink"]}
    assert relative_error(pipe(**CALL, generator=generator()), before) == 0
    with pytest.raises(ValueError, match="does not fit"):
        half()
    assert pipe.get_list_adapters() == {"unet": ["ink", "snow"]}


@pytest.mark.parametrize("adapters", ["ink", {"ink": "1"}, {"ink": float("inf")}, {3: 1.0}, {"ink": True}])
def test_adapters_that_are_none(parallel: ParallelPipeline, adapters: Any) -> None:
    with pytest.raises(PlanError, match="adapters="):
        parallel.submit(**CALL, adapters=adapters)
