"""Check the arguments of ParallelPipeline and start its ranks: plan, devices, executor."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from patchpar.errors import LaunchError, PlanError
from patchpar.launch.accelerators import is_accelerator
from patchpar.launch.devices import Devices, of_torchrun
from patchpar.launch.executor import Executor, check_deadline
from patchpar.launch.inline import InlineExecutor
from patchpar.launch.local import LocalExecutor
from patchpar.launch.ray.executor import RayExecutor
from patchpar.launch.shared_secret import check_trust, read_secret
from patchpar.launch.slurm import resolve_devices_of_task
from patchpar.launch.start_method import resolve_start_method
from patchpar.launch.torchrun import TorchrunExecutor
from patchpar.launch.torchrun_variables import torchrun_world
from patchpar.models.files import path_of
from patchpar.pipeline.graph_option import check_graphs
from patchpar.plan.plan import Plan
from patchpar.shard.vae.modes import check_mode

ENGINE = "patchpar.pipeline.runner:PipelineRunner"
PRELOAD = ("patchpar.pipeline.runner",)
TASKS = (None, "image-to-image", "inpainting")
REFUSED_OPTIONS = {
    "device": "devices= names them, as devices=2, 'cuda' or 'cuda:1'",
    "strategy": "it is a part of the plan, as plan='patch=2,strategy=fresh-edges'",
    "device_map": "a plan divides the work between devices, and with weights=sharded or hosted the memory: pass plan=",
    "use_safetensors": "weights are always read from safetensors, because pickles can run code",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineOptions:
    """Checked arguments of ParallelPipeline. `plan` is None for "auto"; times in seconds."""

    plan: Plan | None
    devices: Devices
    deadline: float
    start_timeout: float
    start_method: str
    verify: bool | Path
    trusted_code: tuple[str, ...]
    vae: str
    graphs: bool | str | None
    symmetric_memory: bool
    secret_file: Path | None
    trusted_network: bool

    @property
    def starts_workers(self) -> bool:
        """Whether the ranks are workers of this process, here or on a Ray cluster."""
        return torchrun_world() is None and (len(self.devices.names) > 1 or self.devices.are_on_ray)

    def executor(self) -> Executor:
        """Return a started executor: in this process, with workers, on Ray, or under torchrun. Raises LaunchError."""
        found: Executor
        if torchrun_world() is not None:
            found = TorchrunExecutor(
                ENGINE,
                deadline=self.deadline,
                device=self.devices.kind or None,
                secret_file=self.secret_file,
                trusted_network=self.trusted_network,
            )
        elif self.devices.are_on_ray:
            found = RayExecutor(
                len(self.devices.names),
                ENGINE,
                deadline=self.deadline,
                start_timeout=self.start_timeout,
                preload=PRELOAD,
                one_by_one=True,
                secret_file=self.secret_file,
                trusted_network=self.trusted_network,
            )
        elif self.starts_workers:
            found = LocalExecutor(
                self.devices.names,
                ENGINE,
                deadline=self.deadline,
                start_timeout=self.start_timeout,
                preload=PRELOAD,
                start_method=self.start_method,
                one_by_one=True,
            )
        else:
            found = InlineExecutor(self.devices.names[0], ENGINE, deadline=self.deadline)
        found.start()
        return found


def check_request(  # noqa: PLR0913 - each is a setting of its own, by name
    devices: object,
    plan: object,
    *,
    deadline: object,
    start_timeout: object,
    start_method: object,
    verify: object,
    trusted_code: object = (),
    vae: object,
    graphs: object = None,
    symmetric_memory: object = False,
    secret_file: object = None,
    trusted_network: object = False,
) -> PipelineOptions:
    """Return the checked arguments. Raises PlanError for an invalid one."""
    wanted = plan_of(plan)
    if isinstance(verify, (str, Path)):
        verify = path_of(verify).absolute()  # workers may have another working directory
    if not isinstance(verify, (bool, Path)):
        raise PlanError(f"verify={verify!r}: use True, False, or a folder for the verification results")
    found = _devices_of(devices, wanted)
    known = None if torchrun_world() is not None or found.are_on_ray else found.names
    secret, is_trusted = _network_trust(secret_file, trusted_network)
    return PipelineOptions(
        plan=wanted,
        devices=found,
        deadline=_seconds("deadline", deadline),
        start_timeout=_seconds("start_timeout", start_timeout),
        start_method=_start_method(start_method, found),
        verify=verify,
        trusted_code=_names_of_code(trusted_code),
        vae=check_mode(vae),
        graphs=check_graphs(graphs, known),
        symmetric_memory=_symmetric_memory(symmetric_memory, known),
        secret_file=secret,
        trusted_network=is_trusted,
    )


def _names_of_code(names: object) -> tuple[str, ...]:
    """Return the checked option. Raises PlanError."""
    if isinstance(names, str) or not isinstance(names, Iterable):
        raise PlanError(f"trusted_code={names!r}: use a list of names of modules or packages, e.g. ['my_module']")
    found = tuple(names)
    for name in found:
        if not isinstance(name, str) or not all(part.isidentifier() for part in name.split(".")):
            raise PlanError(f"trusted_code: {name!r} is no name of a module or package, such as 'my_module'")
    return tuple(sorted(set(found)))


def _network_trust(secret_file: object, trusted_network: object) -> tuple[Path | None, bool]:
    """Return the checked options. Raises PlanError.

    Ranks of torchrun read the file where they connect, so that a bad one is known to all of them. Others need none, but
    a script that will run under torchrun has an error in it all the same.
    """
    if isinstance(secret_file, (str, Path)):
        secret_file = path_of(secret_file)
    secret, is_trusted = check_trust(secret_file, trusted_network)
    if secret is not None and torchrun_world() is None:
        read_secret(secret)
    return secret, is_trusted


def _symmetric_memory(value: object, devices: Sequence[str] | None) -> bool:
    """Return a checked option. `devices`: see `check_graphs`. Raises PlanError."""
    if not isinstance(value, bool):
        raise PlanError(f"symmetric_memory={value!r}: use True or False")
    without = [device for device in devices or () if not is_accelerator(device)]
    if value and without:
        raise PlanError(
            f"symmetric_memory=True: GPUs have such memory, and this pipeline is on {', '.join(without)}: leave it out"
        )
    return value


def check_options(options: Mapping[str, Any]) -> None:
    """Raise PlanError for options of from_pretrained that ranks cannot use, or an unknown task."""
    task = options.get("task")
    if task not in TASKS:
        raise PlanError(f"task={task!r}: use one of {', '.join(map(repr, TASKS))}")
    for name, reason in REFUSED_OPTIONS.items():
        if options.get(name) is not None:
            raise PlanError(f"{name}={options[name]!r} cannot be passed on: {reason}")


def way_and_network(vae: Any, options: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the mode of the VAE and diffusers' options, with the network `vae` in them if it is one."""
    return (vae, dict(options)) if isinstance(vae, str) else ("auto", {**options, "vae": vae})


def plan_of(plan: object) -> Plan | None:
    """Return the plan of a text or a Plan; None for "auto". Raises PlanError."""
    if plan is None or plan == "auto":
        return None
    if isinstance(plan, str):
        plan = Plan.parse(plan)
    if not isinstance(plan, Plan):
        raise PlanError(f"plan={plan!r}: use 'auto', a Plan, or a text such as 'cfg=2,patch=2'")
    plan.check_strategy()
    return plan


def _devices_of(devices: object, plan: Plan | None) -> Devices:
    world = torchrun_world()
    found = of_torchrun(devices, world) if world is not None else resolve_devices_of_task(devices, plan)
    if plan is not None:
        plan.check_devices(len(found.names))
    return found


def _start_method(value: object, devices: Devices) -> str:
    try:
        resolve_start_method(value, devices.names)
    except LaunchError as error:
        raise PlanError(str(error)) from error
    return str(value)


def _seconds(name: str, value: object) -> float:
    try:
        return check_deadline(name, value)
    except LaunchError as error:
        raise PlanError(str(error)) from error
