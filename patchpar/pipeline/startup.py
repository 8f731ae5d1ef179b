"""From what a user asks for to ranks that are starting: plan, devices, executor. Nothing runs before all fits."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from patchpar.errors import LaunchError, PlanError
from patchpar.launch.devices import Devices, resolve_devices
from patchpar.launch.executor import Executor, check_deadline
from patchpar.launch.inline import InlineExecutor
from patchpar.launch.local import LocalExecutor
from patchpar.launch.torchrun import TorchrunExecutor, torchrun_world
from patchpar.plan.plan import Plan
from patchpar.shard.vae.modes import check_mode

ENGINE = "patchpar.pipeline.runner:PipelineRunner"
PRELOAD = ("patchpar.pipeline.runner",)
TASKS = (None, "image-to-image")
REFUSED_OPTIONS = {
    "device_map": "every rank holds the whole pipeline; plan= says how they share the work",
    "use_safetensors": "weights are always read from safetensors, because pickles can run code",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineOptions:
    """What a user asks for, checked. `plan` is None for "auto"; times in seconds."""

    plan: Plan | None
    devices: Devices
    deadline: float
    start_timeout: float
    verify: bool | Path
    vae: str

    @property
    def starts_workers(self) -> bool:
        """Whether its ranks are workers of this process."""
        return torchrun_world() is None and len(self.devices.names) > 1

    def executor(self) -> Executor:
        """Ranks for it, starting: in this process, in workers, or those of torchrun."""
        found: Executor
        if torchrun_world() is not None:
            found = TorchrunExecutor(ENGINE, deadline=self.deadline)
        elif self.starts_workers:
            found = LocalExecutor(
                self.devices.names,
                ENGINE,
                deadline=self.deadline,
                start_timeout=self.start_timeout,
                preload=PRELOAD,
            )
        else:
            found = InlineExecutor(self.devices.names[0], ENGINE, deadline=self.deadline)
        found.start()
        return found


def check_request(
    devices: object, plan: object, *, deadline: object, start_timeout: object, verify: object, vae: object
) -> PipelineOptions:
    """Raise PlanError for a plan, devices, limits or a way of the VAE that cannot be."""
    wanted = plan_of(plan)
    if isinstance(verify, (str, Path)):
        verify = Path(verify).expanduser().absolute()  # ranks may be started somewhere else
    if not isinstance(verify, (bool, Path)):
        raise PlanError(f"verify={verify!r}: True, False, or a folder that keeps the verdicts")
    return PipelineOptions(
        plan=wanted,
        devices=_devices_of(devices, wanted),
        deadline=_seconds("deadline", deadline),
        start_timeout=_seconds("start_timeout", start_timeout),
        verify=verify,
        vae=check_mode(vae),
    )


def check_options(options: Mapping[str, Any]) -> None:
    """Raise PlanError for options of from_pretrained that contradict how ranks load, or a task that is not known."""
    task = options.get("task")
    if task not in TASKS:
        raise PlanError(f"task={task!r}: use one of {', '.join(map(repr, TASKS))}")
    for name, reason in REFUSED_OPTIONS.items():
        if options.get(name) is not None:
            raise PlanError(f"{name}={options[name]!r} cannot be passed on: {reason}")


def way_and_network(vae: Any, options: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """How the VAE runs, and diffusers' options with the network in them, if `vae` is one."""
    return (vae, dict(options)) if isinstance(vae, str) else ("auto", {**options, "vae": vae})


def plan_of(plan: object) -> Plan | None:
    """A plan from "auto" (None), a text or a Plan. Raises PlanError."""
    if plan is None or plan == "auto":
        return None
    if isinstance(plan, str):
        plan = Plan.parse(plan)
    if not isinstance(plan, Plan):
        raise PlanError(f"plan={plan!r}: use 'auto', a Plan, or a text such as 'cfg=2,patch=2'")
    plan.strategy.check_group_size(plan.patch)
    return plan


def _devices_of(devices: object, plan: Plan | None) -> Devices:
    world = torchrun_world()
    if world is not None:
        found = Devices(names=("torchrun",) * world, note=f"{world} ranks started by torchrun")
    elif plan is not None and devices == "auto":
        found = resolve_devices(plan.world_size)
    else:
        found = resolve_devices(devices)
    if plan is not None:
        plan.check_devices(len(found.names))
    return found


def _seconds(name: str, value: object) -> float:
    try:
        return check_deadline(name, value)
    except LaunchError as error:
        raise PlanError(str(error)) from error
