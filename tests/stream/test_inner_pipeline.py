"""A pipeline whose steps are shared by ranks shows the frames of one process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from patchpar.errors import PlanError
from patchpar.models.streaming.config import StreamConfig
from patchpar.plan.stream_plan import StreamPlan
from patchpar.stream.causal.pipeline import StreamingPipeline
from patchpar.stream.worker_group import ENGINE, ModelLoading, WorkerGroup
from tests.conftest import POOL_SIZE
from tests.stream.on_pool import PoolExecutor


def test_a_pipeline_whose_steps_are_shared(face_folder: Path, one: StreamingPipeline, ranks: Any) -> None:
    def frames(pipe: StreamingPipeline) -> list[Tensor]:
        with pipe.stream("a fox", seed=3, seconds=0.8) as session:
            session.set_prompt("a hen", at=2)
            return [chunk.frames for chunk in session]

    plan, config = StreamPlan(sizes=(1, 1), inner=2, decode="last"), StreamConfig.load(face_folder)
    assert plan.ranks == POOL_SIZE
    executor: Any = PoolExecutor(ranks, "shared", ENGINE)
    facts = executor.call("load", str(face_folder), config, plan, {})[0]
    loading = ModelLoading(
        folder=str(face_folder), config=config, options={}, devices=("cpu",) * POOL_SIZE, deadline=60
    )
    found, wanted = frames(StreamingPipeline(WorkerGroup(executor, plan, loading), config, facts)), frames(one)
    assert len(found) == len(wanted) > 3
    assert max(int((a.int() - b.int()).abs().max()) for a, b in zip(found, wanted, strict=True)) <= 1


def test_a_folder_of_too_few_heads_is_refused_by_all_ranks(face_folder: Path, ranks: Any) -> None:
    plan, config = StreamPlan(sizes=(1,), inner=3), replace(StreamConfig.load(face_folder), sigmas=(1.0, 0.0))
    with pytest.raises(PlanError, match="has 2: use at most inner=2"):
        PoolExecutor(ranks, "too few", ENGINE).call("load", str(face_folder), config, plan, {})
