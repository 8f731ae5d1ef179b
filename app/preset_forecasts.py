"""What presets would take for a request: seconds, bytes and memory by the planner. Nothing is generated."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from patchpar import Plan, PlanError
from patchpar.models.files import EMBEDDED, resolve_model
from patchpar.models.hub import cached_model
from patchpar.pipeline.auto_plan import choose
from patchpar.pipeline.planner.forecast import Forecast
from patchpar.pipeline.planner.search import search
from patchpar.pipeline.planner.simulate import Simulator
from patchpar.pipeline.planner.tune.kept_machine import KeptMachines, devices_argument
from patchpar.pipeline.validate import check_call, check_plan_for
from patchpar.plan.byte_sizes import readable_bytes
from patchpar.plan.replay.measured_machine import MeasuredMachine

from .job_queue import Job
from .presets import AUTOMATIC, SINGLE, Preset
from .requests import GenerateRequest
from .workers import AppConfig, AppWorkers

HEAD = ("preset", "image", "plan", "seconds", "sent per step, by a rank", "memory of a rank")
ANY_MACHINE = "{}xH100-nvlink"  # for bytes and memory, which are the same on all machines
PLANNED = ("height", "width", "guidance_scale")  # arguments of a request that a forecast depends on


@dataclass(frozen=True, slots=True, kw_only=True)
class PresetForecast:
    """The forecast of a preset, or why it cannot run."""

    preset: Preset
    forecast: Forecast | None = None
    refusal: str = ""

    def row(self, *, is_measured: bool, has_context: bool) -> tuple[str, ...]:
        """Cells of the table. `is_measured`: the machine. `has_context`: CUDA takes memory of its own."""
        found = self.forecast
        if found is None:
            return self.preset.title, self.refusal, *[""] * (len(HEAD) - 2)
        most = max(sum(sent.values()) for sent in found.bytes_sent)
        memory = max(each.total - (0 if has_context else each.context) for each in found.memory)
        image = "approximate" if found.plan.patch > 1 and found.plan.strategy.policy.remembers else "exact"
        seconds = f"{found.seconds:.1f} s" if is_measured else "unknown"
        sent = readable_bytes(most) if most else "nothing"
        return self.preset.title, image, str(found.plan), seconds, sent, readable_bytes(memory)


@dataclass(frozen=True, slots=True, kw_only=True)
class PresetForecasts:
    """Forecasts of presets for one request. `machine`: the measurement of the devices; None without one."""

    forecasts: tuple[PresetForecast, ...]
    machine: MeasuredMachine | None
    devices: Sequence[str]

    @property
    def rows(self) -> list[tuple[str, ...]]:
        """Rows of the table."""
        has_context = any(name.startswith("cuda") for name in self.devices)
        measured = self.machine is not None
        return [each.row(is_measured=measured, has_context=has_context) for each in self.forecasts]

    @property
    def note(self) -> str:
        """What the numbers are."""
        if self.machine is not None:
            return "Predicted from what patchpar tune has measured of these devices, not measured with this model."
        return (
            "Bytes and memory are predicted. Seconds are unknown, since these devices have not been measured: run "
            f"patchpar tune --devices {devices_argument(self.devices)}"
        )


def forecast_presets(
    workers: AppWorkers, job: Job, request: GenerateRequest, kept: KeptMachines | None = None
) -> PresetForecasts:
    """Forecast the presets that have a purpose, and one device. `kept`: measurements; None: those of this user.

    Raises PlanError for a request that no plan can run and for a model that is in no folder; Cancelled.
    """
    devices = workers.setup.devices.names
    machine = (kept or KeptMachines.in_home()).find(devices)
    planner = _Planner(workers, request, machine)
    presets = [each for each in workers.presets if each.purpose or each.degrees == SINGLE]
    found = []
    for number, preset in enumerate(presets):
        job.check()
        job.show(note=f"forecast of {preset.label}", step=number, steps=len(presets))
        found.append(planner.of(preset))
    return PresetForecasts(forecasts=tuple(found), machine=machine, devices=devices)


class _Planner:
    """Forecasts of one request. Raises PlanError."""

    def __init__(self, workers: AppWorkers, request: GenerateRequest, machine: MeasuredMachine | None) -> None:
        self._count, self._machine, self._steps = workers.count, machine, request.steps
        self._model = workers.loaded_model()
        arguments = request.arguments(self._model.parameters)
        self._call = {name: arguments[name] for name in PLANNED if name in arguments}
        check_call(self._model, self._call)
        model, options = folder_of(workers.setup)
        self._simulator = Simulator(model, machine or ANY_MACHINE.format(self._count), options, self._call)

    def of(self, preset: Preset) -> PresetForecast:
        """The forecast of a preset, or why it has none."""
        try:
            plan = preset.plan(self._count)
            plan = self._automatic() if plan == AUTOMATIC else plan
            assert isinstance(plan, Plan)
            check_plan_for(self._model, plan, {"prompt": "", **self._call})
            found = self._simulator.of(plan)
        except PlanError as error:
            return PresetForecast(preset=preset, refusal=str(error))
        steps, warm_up = self._steps, min(found.warm_up_steps, self._steps)
        return PresetForecast(preset=preset, forecast=replace(found, steps=steps, warm_up_steps=warm_up))

    def _automatic(self) -> Plan:
        """The plan that plan="auto" takes: of a measured machine that of the shortest step."""
        chosen = choose(self._model, self._count, {"prompt": "", **self._call}).plan
        if self._machine is None or self._count == 1:
            return chosen
        branches = self._model.branches(self._call)
        return search(self._machine, branches, "exact", self._simulator.of, in_order=True).best.plan


def folder_of(setup: AppConfig) -> tuple[str, dict[str, Any]]:
    """The model's folder, or its name if it is an embedded one, and its options. Raises PlanError."""
    options = dict(setup.options)
    if setup.model in EMBEDDED:
        return setup.model, options
    source, _, folder = resolve_model(setup.model, options)
    folder = folder or cached_model(source, options)
    if folder is None:
        raise PlanError(f"{setup.model} is not in the cache of the hub as a whole, so that there is no forecast")
    return str(folder.path), options
