"""GPUs that only pretend: what torch says of them, and which of them was the current one when."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch


class FakeGpus:
    """In the place of torch.cuda. `uuids`: of the cards that this process sees. `log`: what was made current."""

    def __init__(self, uuids: Sequence[str]) -> None:
        self.uuids, self.log = list(uuids), list[str]()

    def device_count(self) -> int:
        return len(self.uuids)

    def set_device(self, device: str) -> None:
        self.log.append(f"set {device}")

    @contextmanager
    def device(self, device: str) -> Iterator[None]:
        self.log.append(f"enter {device}")
        try:
            yield
        finally:
            self.log.append(f"leave {device}")

    def get_device_properties(self, device: str) -> Any:
        return SimpleNamespace(uuid=self.uuids[torch.device(device).index or 0])


def pretend(monkeypatch: pytest.MonkeyPatch, gpus: FakeGpus, kind: str = "cuda") -> FakeGpus:
    """Make torch's devices of `kind` these, and those of all other accelerators none."""
    none = SimpleNamespace(device_count=lambda: 0)
    monkeypatch.setattr(torch, "get_device_module", lambda named: gpus if named == kind else none)
    return gpus
