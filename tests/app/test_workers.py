"""Which pipelines of the page stay open side by side."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from app.workers import IMAGES, AppConfig, AppWorkers
from patchpar.launch.accelerators import KINDS


@pytest.mark.parametrize("kind", [*KINDS, "cpu"])
def test_one_pipeline_makes_room_for_the_other_on_every_kind_of_gpu(kind: str) -> None:
    """Not on the CPU, where that of images stays, so that the next image is as fast as the last."""
    devices: Any = SimpleNamespace(names=(f"{kind}:0",) if kind in KINDS else (kind,))
    workers, closed = AppWorkers(AppConfig(devices=devices)), list[str]()
    for name in (IMAGES, "enlarging", "inpainting"):
        workers._opened(name, lambda name=name: SimpleNamespace(close=lambda: closed.append(name)))
    assert closed == (["enlarging"] if kind == "cpu" else [IMAGES, "enlarging"])
