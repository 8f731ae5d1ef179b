"""Strategies of other packages, by entry points: found by name, refused in words, run like those of this package."""

from __future__ import annotations

import importlib
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from patchpar import FreshEdges, Plan
from patchpar.comm.collectives import Communicator
from patchpar.comm.transport import Transport
from patchpar.errors import PlanError
from patchpar.plan.mesh import Axis
from patchpar.plan.step_clock import StepClock
from patchpar.strategies import parse_strategy
from patchpar.strategies.strategy import PatchStrategy
from tests.exact.denoisers import build, call
from tests.tensors import relative
from tests.unit.threads import on_threads
from tests.vae.autoencoders import raised

MODULE = '''
from dataclasses import dataclass
from typing import ClassVar

from patchpar.plan.exchange_policy import ExchangePolicy
from patchpar.strategies.strategy import PatchStrategy


@dataclass(frozen=True, slots=True, kw_only=True)
class StaleHalos(PatchStrategy):
    """Halos of the last step, everything else of this one."""

    name: ClassVar[str] = "stale-halos"
    warmup_steps: int = 1

    @property
    def policy(self) -> ExchangePolicy:
        return ExchangePolicy(name=str(self), halo="stale", warmup_steps=self.warmup_steps)


class Other(StaleHalos):
    pass


def no_class() -> None:
    pass
'''

REPOSITORY = Path(__file__).parent.parent.parent
MAX_LINES = 60  # of what a reader writes to have a strategy in a table
Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Install a package, as pip would, with the strategies `name = "module:object"`."""
    monkeypatch.syspath_prepend(tmp_path)

    def put(package: str = "halos", **registered: str) -> None:
        (tmp_path / f"{package}_strategies.py").write_text(MODULE)
        monkeypatch.delitem(sys.modules, f"{package}_strategies", raising=False)
        info = tmp_path / f"{package}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        lines = [f"{name.replace('_', '-')} = {package}_strategies:{found}" for name, found in registered.items()]
        (info / "entry_points.txt").write_text("\n".join(["[patchpar.strategies]", *lines]))

    return put


def test_a_plan_names_it_and_prints_what_is_read_back(install: Install) -> None:
    install(stale_halos="StaleHalos")
    plan = Plan.parse("patch=2,strategy=stale-halos:warmup_steps=3")
    assert plan.strategy.warmup_steps == 3
    assert str(plan) == "patch=2,strategy=stale-halos:warmup_steps=3"
    assert Plan.parse(str(plan)) == plan


def test_its_options_are_checked_like_all(install: Install) -> None:
    install(stale_halos="StaleHalos")
    with pytest.raises(PlanError, match="'stale-halos' does not know 'bits=4': its options are warmup_steps"):
        parse_strategy("stale-halos:bits=4")


def test_it_is_among_the_names_that_are_valid(install: Install) -> None:
    install(stale_halos="StaleHalos")
    with pytest.raises(PlanError, match=r"use one of exact, fresh-edges, .*, stale-halos$"):
        parse_strategy("magic")


@pytest.mark.parametrize(
    ("name", "found", "reason"),
    [
        ("stale_halos", "Missing", "cannot be loaded from 'halos_strategies:Missing': AttributeError"),
        ("stale_halos", "no_class", "has to be a dataclass derived from"),
        ("lagging", "StaleHalos", "has name='stale-halos'"),
        ("exact", "StaleHalos", "a strategy 'exact', which this package has too"),
    ],
)
def test_one_that_cannot_work_is_refused_with_its_package(install: Install, name: str, found: str, reason: str) -> None:
    install(**{name: found})
    with pytest.raises(PlanError, match=reason) as refused:
        parse_strategy(name.replace("_", "-") if name != "exact" else "magic")
    assert "halos" in str(refused.value)


def test_two_of_one_name_are_refused(install: Install) -> None:
    install("halos", stale_halos="StaleHalos")
    install("other", stale_halos="StaleHalos")
    with pytest.raises(PlanError, match=r"'stale-halos', which (halos|other) has too: uninstall one"):
        parse_strategy("stale-halos")


def test_those_of_this_package_need_no_other(install: Install) -> None:
    install(stale_halos="Missing", exact="Missing")
    assert parse_strategy("fresh-edges") == FreshEdges()


def tutorial() -> dict[str, str]:
    """What the page has its reader write and type: the module, `pyproject.toml`, commands."""
    text = (REPOSITORY / "docs" / "howto" / "add-a-strategy.md").read_text()
    text = text.partition("\n## A package of your own")[2].partition("\nThe name is now valid")[0]
    return {language: block for language, block in re.findall(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)}


def test_the_tutorial_is_short_and_registers_its_class(install: Install, tmp_path: Path) -> None:
    written = tutorial()
    assert set(written) == {"python", "toml", ""}
    assert sum(block.count("\n") for block in written.values()) <= MAX_LINES
    ((name, module, kind),) = re.findall(
        r'^([\w-]+) = "(\w+):(\w+)"$', written["toml"].partition("strategies")[2], re.M
    )
    install("halos", **{name.replace("-", "_"): kind})
    (tmp_path / "halos_strategies.py").write_text(written["python"])
    assert (name, module) == ("stale-halos", "stale_halos")
    assert f"--strategy {name} " in written[""]
    assert str(Plan.parse(f"patch=2,strategy={name}").strategy.policy.halo) == "stale"


@pytest.mark.breadth
def test_the_tutorial_ends_with_a_row_in_a_table(tmp_path: Path) -> None:
    """Installed by pip, and measured by the command, of a small image."""
    written, site = tutorial(), tmp_path / "site"
    (tmp_path / "stale_halos.py").write_text(written["python"])
    (tmp_path / "pyproject.toml").write_text(written["toml"])
    options = ("--quiet", "--no-index", "--no-deps", "--no-build-isolation", "--target", str(site))
    subprocess.run([sys.executable, "-m", "pip", "install", *options, "."], cwd=tmp_path, check=True, timeout=120)
    command = shlex.split(written[""].splitlines()[-1].replace("cpu:4", "cpu:2").replace("--steps 20", "--steps 3"))
    words = [*command[1:], "--height", "128", "--width", "128", "--ranks", "2"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(site), str(REPOSITORY)])}
    done = subprocess.run(
        [sys.executable, "-m", "patchpar", *words], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    table = (tmp_path / "bench" / "table.md").read_text()
    assert {row.split("|")[1].strip() for row in table.splitlines() if row.startswith("| patch=2")} == {
        f"patch=2,strategy={name}" for name in ("stale-halos", "displaced", "fresh-edges")
    }


def errors_of(strategy: Any, steps: int) -> list[float]:
    """The relative error of each of some steps on two ranks; the latent moves from step to step."""
    networks = [build("sdxl") for _ in range(3)]
    arguments = call("sdxl", 8, 8)
    calls = [arguments | {"sample": arguments["sample"] * (1 - step / 10)} for step in range(steps)]
    with torch.no_grad():
        whole = [networks[2](**each)[0] for each in calls]

    def of_rank(transport: Transport) -> list[Tensor]:
        network, clock = networks[transport.rank], StepClock(guided=False)
        split = strategy.install(
            network, Communicator(transport), Axis("patch", transport.rank, 2, (0, 1)), clock=clock
        )
        found = []
        for each in calls:
            clock.next_call()
            with torch.no_grad():
                found.append(split.denoise(network.forward, **each)[0])
            clock.tick()
        return found

    split = raised(on_threads(2, of_rank, deadline=60.0))[0]
    return [relative(own, one) for own, one in zip(split, whole, strict=True)]


def test_it_runs_and_its_halos_are_old(install: Install) -> None:
    install(stale_halos="StaleHalos")
    exact = errors_of(parse_strategy("exact"), 3)
    first, second, third = errors_of(parse_strategy("stale-halos:warmup_steps=2"), 3)
    assert max(*exact, first, second) <= 1e-5 < 1e-4 < third < 0.5


def test_a_strategy_of_a_script_needs_no_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_script.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    strategy = importlib.import_module("my_script").StaleHalos(warmup_steps=2)
    assert str(Plan(patch=2, strategy=strategy)) == "patch=2,strategy=stale-halos:warmup_steps=2"
    with pytest.raises(PlanError, match="is not a strategy: use a name"):
        Plan(patch=2, strategy=object())


@dataclass(frozen=True, slots=True, kw_only=True)
class Nameless(PatchStrategy):
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class WithoutPolicy(PatchStrategy):
    name: ClassVar[str] = "mine"


@dataclass(frozen=True, slots=True, kw_only=True)
class WithNone(WithoutPolicy):
    @property
    def policy(self) -> Any:
        return None


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (Nameless, "strategy class Nameless has no name: add one, as name: ClassVar"),
        (WithoutPolicy, "strategy 'mine' has no policy: add a property policy that returns an ExchangePolicy"),
        (WithNone, "strategy 'mine' has the policy None: add a property"),
    ],
)
def test_what_a_class_of_a_script_lacks_is_named(kind: type[PatchStrategy], reason: str) -> None:
    with pytest.raises(PlanError, match=reason):
        Plan(patch=2, strategy=kind())
