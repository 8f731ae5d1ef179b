"""What a callback at the caller may read of the pipeline is asked for after every step: quickly."""

from __future__ import annotations

from typing import Any

from patchpar.pipeline.pipeline_call import facts_of


class Pipe:
    """Remembers which of its properties were read."""

    def __init__(self) -> None:
        self.read: list[str] = []
        self.num_images = 2

    @property
    def guidance_scale(self) -> float:
        return 4.5

    @property
    def device(self) -> Any:
        self.read.append("device")
        return object()

    @property
    def _execution_device(self) -> Any:
        self.read.append("_execution_device")
        return object()

    @property
    def needs_a_call(self) -> int:
        raise AttributeError


def test_plain_attributes_without_a_look_at_all_modules() -> None:
    pipe = Pipe()
    assert facts_of(pipe) == {"num_images": 2, "guidance_scale": 4.5}
    assert pipe.read == []
