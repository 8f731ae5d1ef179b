"""`ParallelPipeline`: a diffusers pipeline on many devices, held as if it were the pipeline itself.

    pipe = ParallelPipeline.from_pretrained("embedded", devices=2)
    image = pipe("a red house on the left, green hills at noon", generator=torch.manual_seed(0)).images[0]

Where the ranks live decides itself: one device is this process, several are worker processes that this one drives, and
under torchrun every process is a rank.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from patchpar.checks import bind, check_call, check_plan
from patchpar.errors import PlanError, UnsupportedModel
from patchpar.launch.context import Executor
from patchpar.launch.devices import Devices, resolve_devices
from patchpar.launch.inline import InlineExecutor
from patchpar.launch.local import LocalExecutor
from patchpar.launch.torchrun import TorchrunExecutor, torchrun_world
from patchpar.models.description import Description
from patchpar.models.folder import check_memory, resolve_model
from patchpar.outcome import Caller, restore_generators
from patchpar.plan import Plan
from patchpar.planner.auto import choose
from patchpar.run import Run
from patchpar.strategies import resolve_strategy

ENGINE = "patchpar.engine:Engine"
PRELOAD = ("patchpar.engine",)
LOAD_SECONDS = 3600.0  # a large model from a slow disk; workers that die are noticed at once all the same
NOT_IN_WORKERS = {
    "to": "devices= says where the pipeline runs, torch_dtype= in what",
    "enable_model_cpu_offload": "each worker holds its device's pipeline whole",
    "enable_sequential_cpu_offload": "each worker holds its device's pipeline whole",
    "save_pretrained": "the workers' copies are not meant to be saved; save the pipeline before parallelising it",
    "push_to_hub": "the workers' copies are not meant to be saved; save the pipeline before parallelising it",
}
NOT_IN_BANDS = {
    "enable_freeu": "FreeU filters frequencies of the whole map",
    "enable_attention_slicing": "sliced attention does not call scaled_dot_product_attention",
    "enable_xformers_memory_efficient_attention": "xformers does not call scaled_dot_product_attention",
}


class ParallelPipeline:
    """One diffusers pipeline on several devices.

    `pipe`: a pipeline in memory. `devices`: see `launch.devices.resolve_devices`. `plan`: "auto", a `Plan`, or a text
    such as "cfg=2,patch=2". `deadline`: seconds that no rank may stand still. `verify`: compare each denoiser, split,
    with its plain forward when it is first used. Raises PlanError before any work; LaunchError if workers fail.
    """

    _own = frozenset({"on_step", "last_run", "_interrupt"})

    def __init__(
        self,
        pipe: Any,
        *,
        devices: object = "auto",
        plan: Plan | str = "auto",
        deadline: float = 60.0,
        start_timeout: float = 600.0,
        verify: bool = True,
    ) -> None:
        if not (hasattr(pipe, "components") and callable(pipe)):
            raise PlanError(f"{type(pipe).__name__} is no diffusers pipeline; a folder or name goes to from_pretrained")
        self._launch(devices, plan, deadline=deadline, start_timeout=start_timeout, verify=verify)
        self._settle("adopt", pipe)

    @classmethod
    def from_pretrained(
        cls,
        model: str | Path,
        *,
        devices: object = "auto",
        plan: Plan | str = "auto",
        deadline: float = 60.0,
        start_timeout: float = 600.0,
        verify: bool = True,
        **options: Any,
    ) -> ParallelPipeline:
        """Load `model` (a folder, a hub name, or "embedded") in every rank; `options` go to diffusers' from_pretrained.

        Weights are read from safetensors only. Raises PlanError for a bad path, folder, weight file, plan or device.
        """
        source, options, folder = resolve_model(model, options)
        self = cls.__new__(cls)
        self._launch(devices, plan, deadline=deadline, start_timeout=start_timeout, verify=verify)
        try:
            check_memory(folder, self._executor.devices, _growth(options))
        except PlanError:
            self.close()
            raise
        self._settle("load", source, options)
        return self

    # --- setting up ---------------------------------------------------------------------------------------------

    def _launch(
        self, devices: object, plan: Plan | str, *, deadline: float, start_timeout: float, verify: bool
    ) -> None:
        wanted = _plan_of(plan)
        found = _devices_of(devices, wanted)
        object.__setattr__(self, "_state", _State(wanted, found, verify))
        self._state.executor = _executor(found, deadline, start_timeout)
        self._executor.start()

    def _settle(self, method: str, *args: Any) -> None:
        """Have every rank take its pipeline, and learn what it is."""
        try:
            results = self._executor.call(method, *args, replay=True, expected=LOAD_SECONDS)
            self._state.model = next(result for result in results if result is not None)
            if self._state.wanted is not None:
                check_plan_alone(self._model, self._state.wanted)
        except BaseException:
            self.close()
            raise

    @property
    def _executor(self) -> Executor:
        executor = self._state.executor
        if executor is None:
            raise PlanError("this pipeline is closed; make a new one")
        return executor

    @property
    def _model(self) -> Description:
        model = self._state.model
        assert model is not None, "a pipeline is described as soon as it is loaded"
        return model

    # --- a call -------------------------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the wrapped pipeline's call does, with all its arguments; returns its own output class.

        Raises PlanError before any rank works if this call cannot be done; WorkerDied or WorkerHung if a rank fails
        (the next call starts it again).
        """
        bound = bind(self._model, args, kwargs)
        check_call(self._model, bound)
        plan = self._plan_for(bound)
        check_plan(self._model, plan, bound)
        self._install(plan)
        caller = Caller(self, bound, kind=self._executor.kind, progress=self._state.progress, on_step=self.on_step)
        start = time.perf_counter()
        with caller.listening():
            results = self._executor.call(
                "draw", caller.kwargs, caller.options, on_event=caller.on_event, on_ask=caller.on_ask
            )
        drawn = [result for result in results if result is not None]
        restore_generators(self._executor.kind, bound, drawn)
        self._state.last_run = _run_of(plan, drawn, time.perf_counter() - start)
        return caller.merge([result.output for result in drawn if result.output is not None])

    def _plan_for(self, kwargs: Mapping[str, Any]) -> Plan:
        state = self._state
        if state.wanted is not None:
            return state.wanted
        prompts = kwargs.get("prompt")
        choice = choose(
            self._model,
            self._executor.world_size,
            guided=self._model.guided(kwargs),
            size=self._model.size(kwargs),
            prompts=len(prompts) if isinstance(prompts, list) and _own_generators(kwargs, len(prompts)) else 1,
        )
        state.reason = choice.reason
        return choice.plan

    def _install(self, plan: Plan) -> None:
        state = self._state
        if state.plan != plan:
            state.plan = None
            self._executor.call("install", plan, verify=state.verify, replay=True)
            state.plan = plan

    # --- what the user may look at and set -----------------------------------------------------------------------

    @property
    def plan(self) -> Plan | None:
        """The plan of the latest call, or the one asked for; None while "auto" has not yet chosen."""
        return self._state.plan or self._state.wanted

    @property
    def last_run(self) -> Run | None:
        """Figures of the latest call."""
        return self._state.last_run

    @property
    def on_step(self) -> Callable[[int, int], object] | None:
        """Called here with (step, number of steps) after each step; it replaces the progress bar."""
        return self._state.on_step

    @on_step.setter
    def on_step(self, function: Callable[[int, int], object] | None) -> None:
        self._state.on_step = function

    def explain(self) -> str:
        """Devices, plan, and why this plan."""
        state = self._state
        reason = state.reason or ("as asked for" if state.wanted else "chosen at the first call")
        return f"{state.devices.note}; plan {self.plan or 'auto'}: {reason}"

    def restore(self) -> None:
        """Take every hook out: from now on the pipeline runs as diffusers made it, on the first device."""
        self._executor.call("restore", replay=True)
        self._state.wanted, self._state.plan = Plan(), Plan()

    def set_progress_bar_config(self, **config: Any) -> None:
        """As diffusers' own: options of the progress bar."""
        self._state.progress = config
        if self._executor.kind != "local":
            self._executor.call("apply", "set_progress_bar_config", (), config)

    def __getattr__(self, name: str) -> Any:
        """Methods of the pipeline act on all ranks; attributes come from the first."""
        if name.startswith("__") or name == "_state":
            raise AttributeError(name)
        if name in self._model.methods:
            return self._method(name)
        return self._executor.call("get", name)[0]

    def _method(self, name: str) -> Callable[..., Any]:
        self._refuse(name)

        def broadcast(*args: Any, **kwargs: Any) -> Any:
            results = self._executor.call("apply", name, args, kwargs, replay=True, expected=LOAD_SECONDS)
            return self if results[0] is None else results[0]

        broadcast.__name__ = name
        return broadcast

    def _refuse(self, name: str) -> None:
        if self._executor.world_size > 1 and name in NOT_IN_WORKERS:
            raise UnsupportedModel(f"{name} is not for several devices: {NOT_IN_WORKERS[name]}")
        patch = self._state.wanted.patch if self._state.wanted else self._executor.world_size
        if patch > 1 and name in NOT_IN_BANDS:
            raise UnsupportedModel(f"{name} does not go with axis 'patch': {NOT_IN_BANDS[name]}. Use plan cfg=2")

    def __setattr__(self, name: str, value: Any) -> None:
        """Attributes of the pipeline, such as `scheduler`, are set on all ranks."""
        if name == "_interrupt":
            self._state.interrupt = bool(value)
        elif isinstance(getattr(type(self), name, None), property):
            object.__setattr__(self, name, value)
        else:
            self._executor.call("set", name, value, replay=True)

    # --- the end ------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """End the workers. Idempotent; also done at exit."""
        executor, self._state.executor = self._state.executor, None
        if executor is not None:
            executor.close()

    def __enter__(self) -> ParallelPipeline:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _State:
    """Everything a ParallelPipeline knows, apart, so that its other attributes can be the pipeline's."""

    def __init__(self, wanted: Plan | None, devices: Devices, verify: bool) -> None:
        self.wanted, self.devices, self.verify = wanted, devices, verify
        self.executor: Executor | None = None
        self.model: Description | None = None
        self.plan: Plan | None = None
        self.reason = ""
        self.last_run: Run | None = None
        self.on_step: Callable[[int, int], object] | None = None
        self.progress: dict[str, Any] = {}
        self.interrupt = False


def check_plan_alone(model: Description, plan: Plan) -> None:
    """Raise UnsupportedModel when a plan can do no call of this model at all."""
    if plan.patch > 1:
        check_plan(model, Plan(patch=plan.patch, split=plan.split), {"image": ()})


def _plan_of(plan: Plan | str) -> Plan | None:
    if isinstance(plan, str):
        if plan == "auto":
            return None
        plan = Plan.parse(plan) if plan != "single" else Plan()
    if not isinstance(plan, Plan):
        raise PlanError(f"plan={plan!r}: use 'auto', a Plan, or a text such as 'cfg=2,patch=2'")
    resolve_strategy(plan.strategy)
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


def _executor(devices: Devices, deadline: float, start_timeout: float) -> Executor:
    if torchrun_world() is not None:
        return TorchrunExecutor(ENGINE, deadline=deadline)
    if len(devices.names) == 1:
        return InlineExecutor(devices.names[0], ENGINE, deadline=deadline)
    return LocalExecutor(devices.names, ENGINE, deadline=deadline, start_timeout=start_timeout, preload=PRELOAD)


def _growth(options: Mapping[str, Any]) -> float:
    """How much larger weights become when they are loaded: half-precision files in fp32."""
    half_files = options.get("variant") in ("fp16", "bf16")
    return 2.0 if half_files and str(options.get("torch_dtype", "float32")).endswith("float32") else 1.0


def _own_generators(kwargs: Mapping[str, Any], prompts: int) -> bool:
    generators = kwargs.get("generator")
    return isinstance(generators, list) and len(generators) == prompts


def _run_of(plan: Plan, drawn: list[Any], seconds: float) -> Run:
    steps = max(result.steps for result in drawn)
    return Run(
        plan=plan,
        seconds=seconds,
        steps=steps,
        bytes_per_step=tuple(result.bytes_sent // max(1, steps) for result in drawn),
        bytes_by_kind=drawn[0].traffic,
        seconds_waited=drawn[0].waited,
    )
