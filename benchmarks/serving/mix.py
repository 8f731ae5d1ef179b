"""A mix of small and large requests on eight devices, in virtual time: what each policy makes of it.

Costs are those of docs/figures/gpu-predict.json: predicted, not measured.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from patchpar.serving.scheduling.policies import POLICIES
from patchpar.serving.scheduling.simulation import SimulatedCluster, SimulatedRequest, simulate
from patchpar.serving.scheduling.state import StepCosts, WaitingRequest

PREDICTED = Path(__file__).parents[2] / "docs" / "figures" / "gpu-predict.json"
GPU = 0
"""The first table of each model: H100 SXM."""
DEVICES, RESUME_SECONDS = 8, 0.5
LOADS = (0.1, 0.3, 0.6, 0.9, 1.2)
SMALL_PART = 0.7
SLACK = (1.0, 2.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A kind of request: a name, the steps of a call, seconds of a step by number of devices."""

    name: str
    steps: int
    costs: StepCosts

    @property
    def alone(self) -> float:
        """Seconds on one device."""
        return self.costs.seconds(1, self.steps)


def kinds(file: Path = PREDICTED) -> tuple[Kind, Kind]:
    """The small and the large request: SDXL with 30 steps and FLUX.1 with 28, at 1024 x 1024."""
    sections = json.loads(file.read_text())
    return (
        Kind(name="SDXL, 30 steps", steps=30, costs=_costs(_of(sections, "SDXL"))),
        Kind(name="FLUX.1 dev, 28 steps", steps=28, costs=_costs(_of(sections, "FLUX"))),
    )


def _of(sections: Iterable[Mapping[str, object]], model: str) -> Sequence[Mapping[str, str]]:
    found = next(each for each in sections if str(each["heading"]).startswith(model))
    tables = found["tables"]
    assert isinstance(tables, list)
    return tables[GPU]


def _costs(rows: Sequence[Mapping[str, str]]) -> StepCosts:
    exact = [row for row in rows if row["strategy"] in ("plain", "`exact`")]
    return StepCosts(steps={int(row["GPUs"]): float(row["step"]) / 1000 for row in exact})


def trace(small: Kind, large: Kind, *, count: int, load: float, seed: int = 0) -> list[WaitingRequest]:
    """Poisson arrivals. `load`: 1 is what all devices can do if each has one request. Deadlines: SLACK x `alone`."""
    random, now, found = Random(seed), 0.0, []
    mean = SMALL_PART * small.alone + (1 - SMALL_PART) * large.alone
    for number in range(count):
        now += random.expovariate(DEVICES * load / mean)
        kind = small if random.random() < SMALL_PART else large
        deadline = now + random.uniform(*SLACK) * kind.alone
        request = WaitingRequest(name=number, arrival=now, steps=kind.steps, costs=kind.costs, deadline=deadline)
        found.append(request)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a policy made of a trace: fraction of deadlines met, requests per minute, mean seconds, suspensions."""

    policy: str
    load: float
    met: float
    per_minute: float
    seconds: float
    suspensions: int


def outcome_of(policy: str, load: float, ended: Sequence[SimulatedRequest]) -> Outcome:
    """Summarise the requests of a trace."""
    count = len(ended)
    return Outcome(
        policy=policy,
        load=load,
        met=sum(each.is_met for each in ended) / count,
        per_minute=60 * count / max(each.end for each in ended),
        seconds=sum(each.seconds for each in ended) / count,
        suspensions=sum(each.starts - 1 for each in ended),
    )


def outcomes(count: int, loads: Sequence[float] = LOADS) -> Iterator[Outcome]:
    """Every policy at every load; `deadline` also where requests can be suspended."""
    small, large = kinds()
    for load in loads:
        requests = trace(small, large, count=count, load=load)
        for name, policy in POLICIES.items():
            yield outcome_of(name, load, simulate(policy, SimulatedCluster(devices=DEVICES), requests))
        able = SimulatedCluster(devices=DEVICES, can_suspend=True, resume_seconds=RESUME_SECONDS)
        yield outcome_of("deadline, suspending", load, simulate(POLICIES["deadline"], able, requests))
