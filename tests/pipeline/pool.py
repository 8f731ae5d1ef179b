"""A pool of two workers with a tiny pipeline, for all tests that call pipelines: it takes seconds to start.

tests/conftest.py makes these fixtures known to every test, so that there is one pool in a session and not one for each
folder. What takes long to import is imported where it is used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from copy import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from patchpar import ParallelPipeline

Hold = Callable[[Any], AbstractContextManager["ParallelPipeline"]]


@pytest.fixture(scope="session")
def sdxl_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved model folder; never write into it."""
    from tests.tiny import build

    folder = tmp_path_factory.mktemp("sdxl")
    build("sdxl").pipe.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def pool(sdxl_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ParallelPipeline]:
    from patchpar import ParallelPipeline

    verifications = tmp_path_factory.mktemp("verifications")
    with ParallelPipeline.from_pretrained(sdxl_folder, devices="cpu:2", verify=verifications) as pipe:
        pipe.set_progress_bar_config(disable=True)
        yield pipe


@pytest.fixture
def parallel(pool: ParallelPipeline) -> Iterator[ParallelPipeline]:
    """The pool, as it was at first."""
    pool.plan = "auto"
    yield pool
    pool.plan, pool.on_step = "auto", None
    pool.set_progress_bar_config(disable=True)


@pytest.fixture
def hold(parallel: ParallelPipeline, sdxl_folder: Path) -> Hold:
    """Lets the workers of the pool hold another pipeline for a while: a fifth of the time that new workers take."""
    state = parallel._state

    @contextmanager
    def held(pipe: Any) -> Iterator[ParallelPipeline]:
        before, repeated = state.model, copy(state.executor._journal._entries)
        state.model = state.executor.call("adopt", pipe)[0]
        try:
            yield parallel
        finally:
            state.executor.call("load", str(sdxl_folder), {})
            state.executor._journal._entries[:] = repeated  # later workers have no such pipeline
            state.model = before

    return held
