"""A pipeline that draws at once, so that the command line can be tested without workers."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

import patchpar
from patchpar.cli import app
from patchpar.launch.devices import resolve_devices
from patchpar.plan.plan import Plan


@dataclass
class FakePipeline:
    """Stands for ParallelPipeline; remembers how it was opened and called."""

    model: str
    options: dict[str, Any]
    devices: tuple[str, ...] = ("cpu", "cpu")
    calls: list[dict[str, Any]] = field(default_factory=list)
    closed: bool = False
    on_step: Any = None
    tracing: bool = False
    last_run: Any = None

    opened: ClassVar[list[FakePipeline]] = []
    error: ClassVar[Exception | None] = None
    noisy: ClassVar[bool] = False
    kind: ClassVar[str] = "Fake"

    @classmethod
    def from_pretrained(cls, model: str, **options: Any) -> FakePipeline:
        pipe = cls(model, options, devices=resolve_devices(options["devices"]).names)
        cls.opened.append(pipe)
        return pipe

    def __enter__(self) -> FakePipeline:
        return self

    def __exit__(self, *_: object) -> None:
        self.closed = True

    @property
    def description(self) -> Any:
        return SimpleNamespace(pipeline=self.kind)

    def set_progress_bar_config(self, **_: Any) -> None: ...

    @property
    def plan(self) -> Plan:
        return Plan(cfg=2)

    def explain(self) -> str:
        return "guidance is on and there are two devices"

    def __call__(self, prompt: Any, **arguments: Any) -> Any:
        arguments["prompt"] = prompt
        self.calls.append(arguments)
        if self.noisy:
            sys.stdout.write("a library talks\n")
        if self.error is not None:
            raise self.error
        if self.on_step is not None:
            self.on_step(1, 2)
            self.on_step(2, 2)
        workers = len(self.devices)
        self.last_run = SimpleNamespace(
            save_trace=lambda path: path.write_text(f"{workers} workers, traced: {self.tracing}"),
            seconds=2.0 / workers,
            as_dict=lambda: {"plan": "cfg=2", "seconds": 2.0 / workers, "steps": 2, "bytes_per_step": [10] * workers},
        )
        if "generator" not in arguments:
            return None
        count = arguments.get("num_images_per_prompt", 1) * (
            len(arguments["prompt"]) if isinstance(arguments["prompt"], list) else 1
        )
        generators = arguments["generator"] if count > 1 else [arguments["generator"]]
        values = np.stack([np.random.default_rng(each.initial_seed()).random((16, 16, 3)) for each in generators])
        values = values * 0.9 + 0.01 * (workers == 1)
        as_array = arguments.get("output_type") == "np"
        images = values if as_array else [Image.fromarray((v * 255).astype(np.uint8)) for v in values]
        return SimpleNamespace(images=images)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> type[FakePipeline]:
    monkeypatch.setattr(patchpar, "ParallelPipeline", FakePipeline, raising=False)
    monkeypatch.setattr(patchpar, "Plan", Plan, raising=False)
    monkeypatch.setattr(FakePipeline, "opened", [])
    monkeypatch.setattr(FakePipeline, "error", None)
    monkeypatch.setattr(FakePipeline, "noisy", False)
    monkeypatch.setattr(FakePipeline, "kind", "Fake")
    return FakePipeline


@pytest.fixture
def run() -> Any:
    """Run a command line; returns click's Result with stdout, stderr and exit_code."""
    runner = CliRunner()
    return lambda *words: runner.invoke(app, [str(word) for word in words])
