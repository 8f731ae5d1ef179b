"""Which plan is fastest, predicted and measured: two ranks of this CPU, links of three speeds, six plans each.

    python -m benchmarks.forecast.ranking --write docs/figures/ranking.md
    python -m benchmarks.forecast.ranking --setting embedded:256 --turns 1

Kernels, calls and the bare link are measured as `patchpar tune` does. Each setting then has a link that delays messages
by so much on top. The choice is that of `patchpar plan` and `plan="auto"`: of about equal predicted steps the plan with
fewer devices, and so on. It is right if its step is the shortest, or at most 5 % longer. Needs a machine that does
nothing else, and says so where it does.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from benchmarks.page import publish
from patchpar.launch.local import LocalExecutor
from patchpar.models.files import embedded_model
from patchpar.pipeline.planner.plan_order import PlanStep, best_first
from patchpar.pipeline.planner.search import step_of
from patchpar.pipeline.planner.simulate import Simulator
from patchpar.pipeline.planner.tune.timer import PREEMPTED, TimedRun
from patchpar.pipeline.planner.tune.tune import CALLS_ON_CPU, ENGINE, measured
from patchpar.plan.link_model import LinkModel
from patchpar.plan.plan import Plan
from patchpar.plan.replay.measured_machine import MeasuredMachine

RUNNER = "benchmarks.forecast.delayed_runner:DelayedRunner"
PLANS = (
    "single",
    "cfg=2",
    "patch=2",
    "patch=2,strategy=displaced:warmup_steps=1",
    "patch=2,strategy=fresh-edges:warmup_steps=1",
    "patch=2,strategy=fresh-edges:context=pooled,warmup_steps=1",
)
LINKS = {
    "shared memory": LinkModel(),
    "1 ms, 500 MB/s": LinkModel(latency=1e-3, rate=5e8),
    "5 ms, 50 MB/s": LinkModel(latency=5e-3, rate=5e7),
}
SETTINGS = (
    *("embedded:192", "embedded:256", "embedded:320", "embedded:384"),
    *("embedded-dit:256", "embedded-dit:384", "embedded-dit:512"),
)
"""A UNet and a transformer; pixels of a side."""
CALL = {"prompt": "a red house on the left, green hills at sunset", "output_type": "latent"}
WITHIN = 0.05
MOST_TURNS = 3
"""Times the turns that are asked for, where others disturb them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One setting on one link: a step by plan, as predicted, and the seconds that were measured."""

    setting: str
    link: str
    predicted: dict[str, PlanStep]
    found: dict[str, float]
    preempted: tuple[str, ...] = ()
    """Plans of which other processes preempted every measurement."""

    @property
    def chosen(self) -> str:
        """The plan that is taken by the predicted steps."""
        return list(self.predicted)[best_first(list(self.predicted.values()))[0]]

    @property
    def best(self) -> str:
        """The plan with the shortest measured step."""
        return min(self.found, key=self.found.__getitem__)

    @property
    def loss(self) -> float:
        """How much longer the step of the chosen plan is than the shortest."""
        return self.found[self.chosen] / self.found[self.best] - 1

    @property
    def speed_up(self) -> float:
        """The step of one device over that of the chosen plan."""
        return self.found["single"] / self.found[self.chosen]

    def without(self, plan: str) -> Row:
        """Return the same row of the other plans."""
        predicted = {name: each for name, each in self.predicted.items() if name != plan}
        found = {name: each for name, each in self.found.items() if name != plan}
        return replace(self, predicted=predicted, found=found)

    def line(self) -> str:
        """Return the row of the table."""
        times = [
            f"{1e3 * self.predicted[plan].seconds:.0f} / {1e3 * self.found[plan]:.0f}{'?' * (plan in self.preempted)}"
            for plan in PLANS
        ]
        return f"| {self.setting} | {self.link} | {' | '.join(times)} | `{self.chosen}` | {self.loss:+.0%} |"


def with_link(machine: MeasuredMachine, link: LinkModel) -> MeasuredMachine:
    """Return the machine with its own link below another one between its devices.

    A rank waits until its own link has brought a message and until the other one would have (`delayed_replay`): the
    time of the faster one is hidden in that of the slower one.
    """
    (own,) = machine.links
    slower = replace(own, latency=max(own.latency, link.latency), rate=min(own.rate, link.rate))
    return replace(machine, links=(slower,))


def predictions(machine: MeasuredMachine, model: str, side: int) -> dict[str, PlanStep]:
    """Return a later step under every plan."""
    simulator = Simulator(
        str(embedded_model(model)), machine, {"torch_dtype": "float32"}, {**CALL, "height": side, "width": side}
    )
    found = {name: simulator.of(Plan.parse(name)) for name in PLANS}
    return {name: step_of(each) for name, each in found.items()}


def rows_of(machine: MeasuredMachine, setting: str, steps: int, turns: int) -> Iterator[Row]:
    """Measure one model and size on every link, the plans in turn."""
    model, _, side = setting.partition(":")
    call = {**CALL, "height": int(side), "width": int(side)}
    with LocalExecutor(["cpu", "cpu"], RUNNER, deadline=300.0) as ranks:
        ranks.call("open", model, expected=120.0)
        for name, link in LINKS.items():
            times: dict[str, list[TimedRun]] = {plan: [] for plan in PLANS}
            for turn in range(MOST_TURNS * turns):
                for plan in [each for each in PLANS if turn < turns or len(calm(times[each])) < turns]:
                    seconds = ranks.call("step_seconds", plan, (link.latency, link.rate), call, steps, expected=600.0)
                    times[plan].append(TimedRun(seconds[0].seconds, max(each.waited for each in seconds)))
            found = {plan: median(calm(each) or [run.seconds for run in each]) for plan, each in times.items()}
            unsure = tuple(plan for plan, each in times.items() if not calm(each))
            predicted = predictions(with_link(machine, link), model, int(side))
            row = Row(setting=setting, link=name, predicted=predicted, found=found, preempted=unsure)
            print(row.line(), flush=True)
            yield row


def calm(runs: Sequence[TimedRun]) -> list[float]:
    """Return the seconds of those runs that no other process preempted."""
    return [run.seconds for run in runs if not run.is_preempted]


def page(rows: Sequence[Row]) -> Iterator[str]:
    """Yield the lines of the page.

    Where one plan is the fastest of most settings, who always takes it is right too: the others are counted apart.
    """
    right = sum(row.loss <= WITHIN for row in rows)
    usual, times = Counter(row.chosen for row in rows).most_common(1)[0]
    others = [row.without(usual) for row in rows]
    right_of_others, worst = sum(row.loss <= WITHIN for row in others), max(row.loss for row in others)
    yield "# Predicted and measured choice of a plan"
    yield ""
    yield (
        "By `python -m benchmarks.forecast.ranking`. Two ranks of one thread each on two CPU cores; messages arrive no "
        "earlier than the link would bring them. Milliseconds of a later step: predicted / measured. The choice is "
        "that of `patchpar plan`: of predicted steps that are [about equal](../simulator.md#choosing-a-plan) the plan "
        "with fewer devices, then an exact one, then the one that sends least. Loss: how much longer its step is than "
        "the shortest that was measured. Where a rank waited for its core "
        f"for more than {PREEMPTED:.0%} of a step, the step was measured again; else it has a question mark."
    )
    yield ""
    yield f"The choice has the shortest step, or one at most {WITHIN:.0%} longer, in {right} of {len(rows)} settings."
    yield (
        f"In {times} of them it is `{usual}`. Among the other plans alone the choice is right in {right_of_others} of "
        f"{len(rows)} settings, in the others up to {worst:.0%} longer."
    )
    yield f"The chosen plan is {min(row.speed_up for row in rows):.2f} times as fast as one device or more."
    yield ""
    yield f"| setting | link | {' | '.join(f'`{plan}`' for plan in PLANS)} | chosen | loss |"
    yield "|" + "---|" * (len(PLANS) + 4)
    yield from (row.line() for row in rows)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--setting", choices=SETTINGS, action="append")
    parser.add_argument("--steps", type=int, default=2, help="that are timed")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--write", type=Path, help="also write the table to this file")
    options = parser.parse_args()
    with LocalExecutor(["cpu", "cpu"], ENGINE, deadline=300.0) as ranks:
        machine = measured(ranks, "float32", CALLS_ON_CPU)
    if machine is None:
        parser.error("others took cores, or two measurements of one call differ by 5 %: run it when nothing else runs")
    rows = [
        row
        for setting in options.setting or SETTINGS
        for row in rows_of(machine, setting, options.steps, options.turns)
    ]
    publish(page(rows), options.write)


if __name__ == "__main__":
    main()
