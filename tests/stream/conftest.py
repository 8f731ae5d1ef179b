"""A tiny model that talks, in this process and on ranks of the pool."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from patchpar.models.streaming.config import StreamConfig
from patchpar.plan.stream_plan import StreamPlan
from patchpar.stream.causal.pipeline import StreamingPipeline
from patchpar.stream.worker_group import ENGINE, ModelLoading, WorkerGroup
from tests.stream.on_pool import PoolExecutor
from tests.stream.tiny import write_folder


@pytest.fixture(scope="session")
def face_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("face"))


@pytest.fixture(scope="session")
def one(face_folder: Path) -> Iterator[StreamingPipeline]:
    with StreamingPipeline.from_pretrained(face_folder, devices="cpu") as pipe:
        yield pipe


@pytest.fixture(scope="session")
def three(face_folder: Path, ranks: Any) -> StreamingPipeline:
    """Two stages and a decoder on ranks 0 to 2 of the pool; rank 3 has no part."""
    config, plan = StreamConfig.load(face_folder), StreamPlan.even(2, 3)
    executor: Any = PoolExecutor(ranks, "stream", ENGINE)
    facts = executor.call("load", str(face_folder), config, plan, {})[0]
    loading = ModelLoading(folder=str(face_folder), config=config, options={}, devices=("cpu",) * 3, deadline=60)
    return StreamingPipeline(WorkerGroup(executor, plan, loading), config, facts)
