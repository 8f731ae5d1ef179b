"""What plans take on a machine: this one as `patchpar tune` has measured it, or one by name from published rates."""

from dataclasses import dataclass, replace

from patchpar import Plan, PlanError
from patchpar.pipeline.planner.forecast import Forecast
from patchpar.pipeline.planner.search import PlanSearchResult, search
from patchpar.pipeline.planner.simulate import Simulator
from patchpar.pipeline.planner.tune.kept_machine import KeptMachines
from patchpar.pipeline.validate import check_call
from patchpar.plan.byte_sizes import readable_bytes
from patchpar.plan.replay.machine import Machine
from patchpar.plan.replay.measured_machine import MeasuredMachine

from .forecast import MAX_DEVICES, CallToPlan
from .job_queue import Job
from .preset_forecasts import PLANNED, folder_of
from .workers import AppWorkers

HERE = "This machine"
MACHINES = (
    HERE, "2xRTX4090-pcie4", "4xL40S-pcie4", "8xA100-nvlink", "8xH100-nvlink", "2x(8xH100-nvlink)-ib400"
)  # fmt: skip
HEAD = ("plan", "step", "image", "memory of a device", "sent per step, by a rank", "result")


@dataclass(frozen=True, slots=True, kw_only=True)
class MachinePlans:
    """What the planner has found; `found.ranked` is the best first. `steps`: of the image."""

    found: PlanSearchResult
    machine: Machine | MeasuredMachine
    steps: int

    @property
    def rows(self) -> list[tuple[str, ...]]:
        """Rows of the table: plans that were replayed, then those that cannot be, with reasons."""
        refused = [(name, *[""] * (len(HEAD) - 2), why) for name, why in self.found.refused.items()]
        return [*(self._row(each) for each in self.found.ranked), *refused]

    def _row(self, found: Forecast) -> tuple[str, ...]:
        whole = replace(found, steps=self.steps, warm_up_steps=min(found.warm_up_steps, self.steps))
        most = max(sum(sent.values()) for sent in found.bytes_sent)
        return (
            str(found.plan),
            _readable(found.step.seconds),
            _readable(whole.seconds),
            readable_bytes(max(each.total for each in found.memory)),
            readable_bytes(most) if most else "nothing",
            "fits" if found.fits else "does not fit",
        )

    @property
    def note(self) -> str:
        """What the numbers are."""
        if isinstance(self.machine, MeasuredMachine):
            known = "what patchpar tune has measured of these devices"
        else:
            known = "published rates of these devices, none of which was measured"
        return f"Predicted for {self.steps} steps from {known}; the first row is the plan to take."


def plans_on(
    workers: AppWorkers, job: Job, machine: str, call: CallToPlan, steps: int, kept: KeptMachines | None = None
) -> MachinePlans:
    """Find what a call takes under the plans for a machine. `kept`: measurements; None: those of this user.

    Raises PlanError for a name that is no machine, devices that were not measured, and a call that no plan can run;
    Cancelled.
    """
    measured = (kept or KeptMachines.in_home()).of(workers.setup.devices.names) if machine == HERE else None
    there = measured or Machine.parse(machine)
    if there.devices > MAX_DEVICES:
        raise PlanError(f"machine {machine!r} has {there.devices} devices: at most {MAX_DEVICES} are looked at here")
    model = workers.loaded_model()
    arguments = call.arguments(model.parameters)
    check_call(model, arguments)
    folder, options = folder_of(workers.setup)
    planned = {name: arguments[name] for name in PLANNED if name in arguments}
    simulator = Simulator(folder, there, options, planned)

    def forecast(plan: Plan, order: tuple[int, ...] = ()) -> Forecast:
        job.check()
        job.show(note=f"forecast of {plan}")
        return simulator.of(plan, order)

    found = search(there, model.branches(planned), "exact", forecast)
    return MachinePlans(found=found, machine=there, steps=steps)


def _readable(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"
