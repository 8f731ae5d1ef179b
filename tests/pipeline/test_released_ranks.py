"""What is free on the device of a rank, and which pipelines can release one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from patchpar import ParallelPipeline, PlanError
from patchpar.pipeline.observed_calls import ObservedCalls
from tests.tiny import build


def test_free_memory_is_that_of_the_rank(parallel: ParallelPipeline) -> None:
    assert parallel.free_memory(1).host is not None
    assert parallel.free_memory(1).device is None, "it is on the CPU"
    with pytest.raises(PlanError, match="there is no rank 9"):
        parallel.free_memory(9)


def test_also_where_it_brings_others_into_its_calls() -> None:
    """Ranks that hold parts of one model are called together."""
    pipe: Any = ObservedCalls()
    pipe._state = SimpleNamespace(ranks=SimpleNamespace(call=lambda *_, **__: ["of rank 1", "of rank 0"]))
    assert pipe.free_memory(1) == "of rank 1"


def test_workers_can_be_released_and_this_process_cannot(parallel: ParallelPipeline) -> None:
    assert parallel.can_release
    with ParallelPipeline(build("sdxl").pipe, devices="cpu") as inline:
        assert not inline.can_release
        for method in (inline.release, inline.take_back):
            with pytest.raises(PlanError, match="ended alone"):
                method(0)
