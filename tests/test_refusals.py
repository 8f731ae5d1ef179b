"""Whatever cannot work is the same sentence at both doors, the command line and the page: value, limit, way out.

The list is that of what a person can get wrong. Nothing here starts a worker: what is refused is refused before.
"""

from __future__ import annotations

import asyncio
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import patchpar
from app.feeds import Feeds
from app.image_runner import ImageJobRunner
from app.image_tab import ImageTab
from app.job_queue import JobQueue
from app.sessions import PageSessions
from app.state import AppState
from patchpar import PlanError, UnsupportedModel, WorkerDied, WorkerError, WorkerHung
from patchpar.cli import app as command
from patchpar.models.files import embedded_model
from patchpar.models.info import describe
from patchpar.pipeline.startup import check_request
from patchpar.pipeline.validate import bind, check_call, check_plan_for
from patchpar.plan.plan import Plan
from tests import tiny
from tests.app.fakes import FakePipeline as PagePipeline
from tests.app.fakes import FakeWorkers
from tests.cli.conftest import FakePipeline as CommandPipeline

FIELDS: dict[str, Any] = {
    "prompt": "a fox", "negative": "", "width": 128, "height": 128, "steps": 4, "guidance": 4.0, "seed": 0
}  # fmt: skip
PSYCHIC = ("--plan", "patch=2", "--strategy", "psychic")
SPEED = ("--plan", "patch=2", "--strategy", "exact:speed=9")
UNGUIDED = ("--plan", "cfg=2", "--guidance-scale", "1")
ROOM = "from 1 to 150"


@dataclass(frozen=True)
class Wrong:
    """`flags` of `patchpar generate`, and what a person fills in on the page instead. `told`: words that both say."""

    name: str
    flags: tuple[str, ...]
    reported: tuple[str, ...]
    filled: dict[str, Any] = field(default_factory=dict)
    degrees: str = ""
    strategy: str = ""
    ranks: int = 2
    side: int = 128
    limits: tuple[str, str] = ("", "")

    def __str__(self) -> str:
        return self.name


GRID = ("no multiple of 8", "use 96 or 104")
BANDS = ("8 latent rows make 2 bands", "8 ranks", "use at most 2", "a height of at least 256 pixels")
CALLS = (
    Wrong("height off the grid", ("--height", "100"), ("height=100", *GRID), {"height": 100}),
    Wrong("width off the grid", ("--width", "100"), ("width=100", *GRID), {"width": 100}),
    Wrong("more ranks than bands", ("--plan", "patch=8"), BANDS, degrees="patch=8", ranks=8, side=64),
    Wrong("too many devices", ("--plan", "cfg=2,patch=2"), ("takes 4", "there are 2"), degrees="cfg=2,patch=2"),
    Wrong(
        "unknown axis",
        ("--plan", "rows=2"),
        ("unknown axis 'rows'", "data, cfg, stage, patch, tensor"),
        degrees="rows=2",
    ),
    Wrong("a degree in words", ("--plan", "patch=two"), ("patch=two", "whole number"), degrees="patch=two"),
    Wrong("unknown strategy", PSYCHIC, ("'psychic'", "exact, "), degrees="patch=2", strategy="psychic"),
    Wrong("unknown option", SPEED, ("speed=9", "its options are"), degrees="patch=2", strategy="exact:speed=9"),
    Wrong("no steps", ("--steps", "0"), ("steps 0",), {"steps": 0}, limits=("at least 1", ROOM)),
    Wrong("less than no steps", ("--steps", "-1"), ("steps -1",), {"steps": -1}, limits=("at least 1", ROOM)),
    Wrong("no guidance", UNGUIDED, ("uses none", "guidance_scale > 1", "cfg=1"), {"guidance": 1.0}, degrees="cfg=2"),
    Wrong("one prompt for two", ("--plan", "data=2"), ("data=2", "1 prompt", "at least 2"), degrees="data=2"),
)

NOTHING = Wrong("nothing", (), ())
FAULTS = (
    (
        UnsupportedModel("SanaTransformer cannot be split over axis 'patch'. Use cfg=2 or data=N"),
        ("cannot be split", "Use cfg=2 or data=N"),
    ),
    (
        WorkerDied("rank 1 (cpu) died, exit code -9: use fewer workers"),
        ("rank 1 (cpu)", "exit code -9", "fewer workers"),
    ),
    (WorkerHung("rank 0 is late by 60 s: raise deadline="), ("late by 60 s", "raise deadline=")),
    (
        WorkerError("rank 1 (cpu): ValueError: no such channel\nTraceback (most recent call last):\n  File x"),
        ("rank 1 (cpu)", "no such channel"),
    ),
)


def is_a_sentence(text: str) -> bool:
    """The value, and after a colon, a comma or the like what is right instead; no name of an error, no traceback."""
    return "Traceback" not in text and not re.match(r"\w+Error", text) and re.search(r"\w[:;,.] ?\w", text) is not None


def has_all(text: str, words: tuple[str, ...]) -> bool:
    flat = " ".join(text.split())
    return all(word in flat for word in words)


@pytest.fixture(scope="module")
def model() -> Any:
    return describe(tiny.build("sdxl").pipe)


class Typed(CommandPipeline):
    """What the command line opens: asks what the real one would ask, and draws at once."""

    model_known: Any = None
    wrong: Exception | None = None

    @classmethod
    def from_pretrained(cls, model: str, **options: Any) -> Any:
        asked = (options["devices"], options["plan"])
        check_request(*asked, deadline=60.0, start_timeout=60.0, start_method="auto", verify=True, vae="auto")
        return super().from_pretrained(model, **options)

    def __call__(self, prompt: Any, **arguments: Any) -> Any:
        if self.wrong is not None:
            raise self.wrong
        call = bind(self.model_known, (prompt,), arguments)
        check_call(self.model_known, call)
        if isinstance(self.options["plan"], Plan):
            check_plan_for(self.model_known, self.options["plan"], call)
        return super().__call__(prompt, **arguments)


class Displayed(PagePipeline):
    """What the page opens, likewise."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.known = model

    @property
    def description(self) -> Any:
        return self.known

    def __call__(self, **arguments: Any) -> Any:
        check_call(self.known, bind(self.known, (), arguments))
        if isinstance(self.plan, Plan):
            check_plan_for(self.known, self.plan, arguments)
        return super().__call__(**arguments)


@pytest.fixture
def typed(model: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Run `patchpar generate` with these flags in an empty folder: (exit code, what it says, files that it left)."""
    monkeypatch.setattr(patchpar, "ParallelPipeline", Typed)
    monkeypatch.setattr(Typed, "opened", [])
    monkeypatch.setattr(Typed, "model_known", model)

    def run(*flags: str) -> tuple[int, str, list[Path]]:
        output = tmp_path / "drawn"
        output.mkdir(exist_ok=True)
        found = CliRunner().invoke(command, ["generate", "a fox", *flags, "-o", str(output / "x.png")])
        return found.exit_code, found.stderr, [*output.iterdir()]

    return run


@pytest.fixture
def displayed(model: Any) -> Iterator[Any]:
    """Press the button of a page with these fields: what it says as an alert."""
    queue = JobQueue()
    pipe = Displayed(model)

    def press(wrong: Wrong, error: Exception | None = None) -> str:
        workers: Any = FakeWorkers(pipe, wrong.ranks)
        state = AppState(workers, ImageJobRunner(workers), queue, PageSessions(queue), Feeds())
        pipe.error = error
        filled = {**FIELDS, "width": wrong.side, "height": wrong.side, **wrong.filled}
        label = state.workers.presets[0].label

        async def last() -> tuple[Any, ...]:
            found: tuple[Any, ...] = ()
            async for each in ImageTab(state).generate(
                "a" * 32, label, wrong.degrees, wrong.strategy, True, 1, *filled.values()
            ):
                found = each
            return found

        (alert,) = (text for text in asyncio.run(last()) if isinstance(text, str) and 'role="alert"' in text)
        state.scratch.cleanup()
        return unescape(re.sub("<[^>]*>", "", alert))

    yield press
    queue.close()


@pytest.mark.parametrize("wrong", CALLS, ids=str)
def test_a_call_that_cannot_be(typed: Any, displayed: Any, wrong: Wrong) -> None:
    given = {"--height": str(wrong.side), "--width": str(wrong.side)}
    sizes = [word for name, side in given.items() if name not in wrong.flags for word in (name, side)]
    code, message, left = typed("--devices", f"cpu:{wrong.ranks}", *sizes, *wrong.flags)
    assert (code, left) == (2, []), message
    *_, sentence = message.partition("error: ")
    for text, limit in zip((sentence, displayed(wrong)), wrong.limits, strict=True):
        assert has_all(text, (*wrong.reported, limit)), text
        assert is_a_sentence(text), text
    if GRID[0] in wrong.reported:
        assert Typed.opened == [], "no worker is started for what the model's folder shows"


@pytest.mark.parametrize(("error", "reported"), FAULTS, ids=lambda value: type(value).__name__)
def test_what_goes_wrong_on_the_way(
    typed: Any, displayed: Any, error: Exception, reported: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Typed, "wrong", error)
    code, message, left = typed()
    assert (code, left) == (2 if isinstance(error, PlanError) else 1, [])
    for text in (message, displayed(NOTHING, error)):
        assert has_all(text, reported), text
        assert "Traceback" not in text


def a_folder(tmp_path: Path, fault: str) -> str:
    """The embedded model with something wrong, or no model at all."""
    if fault == "nowhere":
        return str(tmp_path / "nowhere")
    folder = tmp_path / "model"
    if fault == "no index":
        folder.mkdir()
        return str(folder)
    shutil.copytree(embedded_model(), folder)
    weights = folder / "unet" / "diffusion_pytorch_model.fp16.safetensors"
    if fault == "pickles":
        weights.rename(weights.with_suffix(".bin"))
    elif fault == "cut short":
        weights.write_bytes(weights.read_bytes()[:100_000])
    elif fault == "no weights":
        weights.write_bytes(b"not weights at all")
    return str(folder)


@pytest.mark.parametrize("verb", ["generate", "app"])
@pytest.mark.parametrize(
    ("fault", "reported"),
    [
        ("nowhere", ("nowhere' is no model", "give a folder with model_index.json", "'embedded'")),
        ("no index", ("has no model_index.json",)),
        ("pickles", ("weights only as pickles", "convert them to safetensors")),
        ("cut short", ("should have", "bytes but has 100000", "fetch it again")),
        ("no weights", ("not a whole safetensors file", "Fetch it again")),
        ("no room", ("2 CPU ranks need about", "only 10.0 MiB are free", "use a smaller dtype")),
    ],
)
def test_a_model_that_cannot_be_loaded(
    verb: str, fault: str, reported: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if fault == "no room":
        monkeypatch.setattr("patchpar.models.files.free_memory", lambda: 10 * 2**20)
    words = ["--model", a_folder(tmp_path, fault), "--variant", "fp16", "--devices", "cpu:2"]
    assert_refused(verb, words, reported, tmp_path)


@pytest.mark.parametrize("verb", ["generate", "app"])
@pytest.mark.parametrize(
    ("devices", "reported"),
    [
        ("cuda:0,cuda:0", ("cuda:0",)),
        ("cuda:97", ("cuda:97",)),
        ("tpu", ("'tpu' is not a device", '"cpu:4"')),
        ("0", ("devices=0", "at least 1")),
        ("cpu,cuda:97", ("cuda:97",)),
        ("cpu:many", ("cpu:many", "such as 'cpu:4'")),
    ],
)
def test_devices_that_are_none(verb: str, devices: str, reported: tuple[str, ...], tmp_path: Path) -> None:
    assert_refused(verb, ["--devices", devices], reported, tmp_path)


@pytest.mark.parametrize("verb", ["app", "serve"])
def test_a_port_that_is_none(verb: str) -> None:
    found = CliRunner().invoke(command, [verb, "--port", "99999", *(["embedded"] if verb == "serve" else [])])
    assert found.exit_code == 2, found.output
    message = " ".join(found.stderr.split())
    assert message.endswith("error: --port 99999: it must be a number from 1 to 65535, or 0 for any free port")
    assert "Starting" not in message


def assert_refused(verb: str, words: list[str], reported: tuple[str, ...], folder: Path) -> None:
    """Bad use, in one sentence, and nothing is left behind."""
    output = folder / "drawn"
    output.mkdir()
    where = ["a fox", "-o", str(output / "x.png")] if verb == "generate" else ["--port", "0"]
    found = CliRunner().invoke(command, [verb, *where, *words])
    assert found.exit_code == 2, found.output
    message = found.stderr.split("error: ")[-1]
    assert has_all(message, reported), message
    assert "Traceback" not in message
    assert not [*output.iterdir()]


def test_a_prompt_that_is_none(typed: Any, displayed: Any) -> None:
    found = CliRunner().invoke(command, ["generate"])
    assert (found.exit_code, "Missing argument" in found.stderr) == (2, True)
    assert displayed(Wrong("", (), (), {"prompt": ""})) == "there is no prompt: describe the image"
    assert displayed(Wrong("", (), (), {"prompt": None})) == "prompt is empty: fill it in"
    assert displayed(Wrong("", (), (), {"prompt": ["a fox"]})) == "the prompt is a list: give a text"


def test_a_place_that_cannot_be_written(typed: Any, tmp_path: Path) -> None:
    """Of a page nothing is written where somebody says."""
    code, message, _ = typed("--trace", str(tmp_path / "no" / "folder" / "t.json"))
    assert (code, has_all(message, ("there is no folder", "make it first"))) == (2, True)


def test_a_text_that_is_no_sentence_would_be_seen() -> None:
    assert not is_a_sentence("ValueError: 3")
    assert not is_a_sentence("height 3")
