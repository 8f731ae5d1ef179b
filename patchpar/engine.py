"""What one rank does: holds the diffusers pipeline, makes its denoiser parallel, runs its own loop untouched.

    load / adopt     a pipeline from a folder or the hub, or one handed over
    install          the plan: a hook on every denoiser; nothing else of the pipeline changes
    draw             one call of the pipeline, the same on every rank
    apply            any other method or attribute of the pipeline, on every rank
    restore          every hook out

The cut is at the denoiser call, so schedulers, callbacks, LoRA and post-processing are diffusers' own.
"""

import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import diffusers
import torch
import transformers
from diffusers import DiffusionPipeline
from diffusers.hooks import HookRegistry, ModelHook
from packaging.version import Version
from torch import Tensor, nn

from patchpar.call import Drawn, DrawOptions, generators_of
from patchpar.clock import StepClock
from patchpar.errors import PlanError, UnsupportedModel
from patchpar.exchange import Door
from patchpar.launch.context import RankContext
from patchpar.mesh import Mesh
from patchpar.models.description import DENOISERS, Description, describe
from patchpar.patched import PatchedDenoiser
from patchpar.plan import Plan
from patchpar.strategies import resolve_strategy
from patchpar.strategies.guidance import GuidanceSplit, guidance_of
from patchpar.transport import Transport, connect
from patchpar.verdicts import Verdicts

HOOK = "patchpar_denoiser"


class Engine:
    """One rank's pipeline."""

    def __init__(self, context: RankContext) -> None:
        self.context = context
        self.device = torch.device(context.device)
        self.clock = StepClock()
        self.pipe: Any = None
        self.mesh: Mesh | None = None
        self.plan = Plan()
        self._transport: Transport | None = None
        self._door: Door | None = None
        self._patched: list[PatchedDenoiser] = []
        self._guidance: list[GuidanceSplit] = []
        self._hooked: list[nn.Module] = []
        self._arguments: dict[str, Any] = {}

    # --- the pipeline -------------------------------------------------------------------------------------------

    def load(self, model: str, options: Mapping[str, Any]) -> Description:
        """Load with diffusers, from safetensors only, onto this rank's device."""
        if self.context.world_size > 1:  # one bar per rank and component would only be noise
            diffusers.utils.logging.disable_progress_bar()
            transformers.utils.logging.disable_progress_bar()
        return self.adopt(DiffusionPipeline.from_pretrained(model, use_safetensors=True, **_dtype_named(options)))

    def adopt(self, pipe: Any) -> Description:
        """Take a pipeline that is in memory."""
        if getattr(pipe, "hf_device_map", None):
            raise UnsupportedModel("the pipeline is spread over devices by device_map: load it without device_map")
        self.pipe = pipe if self.context.world_size == 1 else pipe.to(self.device)
        return describe(self.pipe)

    def apply(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Call a method of the pipeline with the seams out, since it may exchange modules. None stands for itself."""
        for patched in self._patched:
            patched.forget()
        result = getattr(self.pipe, name)(*args, **kwargs)
        return None if result is self.pipe else result

    def set(self, name: str, value: Any) -> None:
        """Set an attribute of the pipeline."""
        setattr(self.pipe, name, value)

    def get(self, name: str) -> Any:
        """An attribute of the pipeline, from rank 0. Modules stay where they are."""
        value = getattr(self.pipe, name)
        if isinstance(value, nn.Module) and self.context.world_size > 1:
            raise PlanError(
                f"pipe.{name} is a module that lives in the workers; methods of the pipeline reach it, such as "
                "load_lora_weights or set_adapters. For anything else change it before ParallelPipeline(pipe)"
            )
        return value if self.context.rank == 0 else None

    # --- the plan -----------------------------------------------------------------------------------------------

    def install(self, plan: Plan, *, verify: bool = True) -> None:
        """Make the denoisers parallel. Ranks beyond the plan's stay idle."""
        self.restore()
        strategy = resolve_strategy(plan.strategy)
        self.plan = plan
        if self.context.world_size > 1 and self._transport is None:
            self._transport = connect(self.device, deadline=self.context.deadline)
        if self.context.rank >= plan.world_size or plan.world_size == 1:
            return
        self.mesh = Mesh(self.context.rank, range(plan.world_size), **plan.degrees())
        assert self._transport is not None
        self._door = Door(self._transport, self.context.mark)
        for module in self._denoisers():
            layers: list[Any] = []
            if plan.cfg > 1:
                self._guidance.append(GuidanceSplit(self._door, self.mesh["cfg"], self.clock))
                layers.append(self._guidance[-1])
            if plan.patch > 1:
                verdicts = Verdicts.in_home() if verify else None
                patched = strategy.install(module, self._door, self.mesh["patch"], split=plan.split, verdicts=verdicts)
                self._patched.append(patched)
                layers.append(patched)
            hook = DenoiserHook(self.clock, layers, self._guided)
            HookRegistry.check_if_exists_or_initialize(module).register_hook(hook, HOOK)
            self._hooked.append(module)

    def _guided(self) -> bool | None:
        return guidance_of(self.pipe, self._arguments)

    def _denoisers(self) -> list[nn.Module]:
        return [self.pipe.components[name] for name in DENOISERS if self.pipe.components.get(name) is not None]

    def restore(self) -> None:
        """Take every hook out: the pipeline is as it was."""
        for patched in self._patched:
            patched.restore()
        for module in self._hooked:
            registry: Any = module._diffusers_hook
            registry.remove_hook(HOOK, recurse=False)
            if not registry.hooks:
                del module._diffusers_hook
                module.__dict__.pop("forward", None)
        self._patched, self._guidance, self._hooked = [], [], []
        self.mesh, self._door, self.plan = None, None, Plan()

    def control(self, *, exchanging: bool) -> None:
        """Switch the exchange between bands off: every band alone, wrong on purpose. For negative controls."""
        for patched in self._patched:
            patched.exchanging = exchanging

    # --- a call -------------------------------------------------------------------------------------------------

    def draw(self, kwargs: Mapping[str, Any], options: DrawOptions) -> Drawn | None:
        """One call of the pipeline. None from ranks that the plan leaves idle."""
        if self.context.rank >= self.plan.world_size:
            return None
        self._arguments, random_state = self._own_arguments(kwargs, options)
        self.clock.reset()
        for guidance in self._guidance:
            guidance.reset()
        if self._door is not None:
            self._door.traffic.clear()
        start = time.perf_counter()
        with ExitStack() as stack:
            steps = stack.enter_context(self._stepping())
            if options.quiet:
                stack.enter_context(_no_progress_bar(self.pipe))
            _set_random_state(random_state)
            output = self.pipe(**self._arguments)
        for guidance in self._guidance:
            guidance.finish()
        seconds = time.perf_counter() - start
        return self._report(output, steps=steps[0], seconds=seconds, keep_random=isinstance(random_state, Tensor))

    def _own_arguments(self, given: Mapping[str, Any], options: DrawOptions) -> tuple[dict[str, Any], Any]:
        kwargs, random_state = dict(given), options.random_state
        if options.same_everywhere:
            generators = generators_of(kwargs)
            states = [generator.get_state() for generator in generators]
            states, random_state = self.context.ask(("same", (states, torch.get_rng_state())))
            for generator, state in zip(generators, states, strict=True):
                generator.set_state(state)
        if options.has_callback:
            kwargs["callback_on_step_end"] = self._ask_callback
        if self.mesh is not None and self.mesh["data"].size > 1:
            from patchpar.strategies.data import split_call

            kwargs = split_call(kwargs, self.mesh["data"].rank, self.mesh["data"].size)
        return kwargs, random_state

    def _ask_callback(self, pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        """The caller's callback runs where the caller is; all ranks take its answer."""
        question = ("callback", step, timestep, tensors) if self.context.rank == 0 else None
        changed, interrupt = self.context.ask(question)
        if interrupt:
            pipe._interrupt = True
        return {name: _moved(value, tensors.get(name)) for name, value in changed.items()}

    @contextmanager
    def _stepping(self) -> Iterator[list[int]]:
        """Tick the clock whenever the scheduler steps; rank 0 tells the caller."""
        scheduler, steps = getattr(self.pipe, "scheduler", None), [0]
        if scheduler is None:
            yield steps
            return
        original = scheduler.step

        @functools.wraps(original)  # diffusers reads the signature of scheduler.step
        def step(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            self.clock.tick()
            steps[0] += 1
            self.context.mark(f"step {steps[0]}")
            if self.context.rank == 0:
                self.context.emit(("step", steps[0], _total_steps(self.pipe, scheduler)))
            return result

        scheduler.step = step
        try:
            yield steps
        finally:
            del scheduler.step

    def _report(self, output: Any, *, steps: int, seconds: float, keep_random: bool) -> Drawn:
        gives = self.mesh is None or (self.mesh["cfg"].rank == 0 and self.mesh["patch"].rank == 0)
        traffic = self._door.traffic if self._door is not None else None
        return Drawn(
            output=output if gives else None,
            steps=steps,
            seconds=seconds,
            bytes_sent=traffic.total_bytes if traffic else 0,
            traffic=dict(traffic.bytes_sent) if traffic else {},
            waited=dict(traffic.seconds_waited) if traffic else {},
            generators=tuple(generator.get_state() for generator in generators_of(self._arguments)),
            random_state=torch.get_rng_state() if keep_random else None,
        )


class DenoiserHook(ModelHook):  # type: ignore[misc]  # diffusers is not typed
    """Stands before a denoiser's forward and passes the call through the plan's layers, outermost first."""

    def __init__(self, clock: StepClock, layers: Sequence[Any], guided: Callable[[], bool | None]) -> None:
        super().__init__()
        self.clock, self.layers, self.guided = clock, tuple(layers), guided

    def new_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Replaces the denoiser's forward."""
        self.clock.guided = self.guided()
        self.clock.next_call()
        forward = self.fn_ref.original_forward
        for layer in reversed(self.layers):
            forward = functools.partial(layer.denoise, forward)
        return forward(*args, **kwargs)


def _total_steps(pipe: Any, scheduler: Any) -> int:
    timesteps = getattr(scheduler, "timesteps", None)
    count = getattr(pipe, "_num_timesteps", None)
    return int(count) if isinstance(count, int) else (len(timesteps) if timesteps is not None else 0)


def _dtype_named(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options with the dtype as torch's, under the name that this version of diffusers takes."""
    options = dict(options)
    for name in ("torch_dtype", "dtype"):
        dtype = options.pop(name, None)
        if dtype is not None:
            new = Version(diffusers.__version__) >= Version("0.42.0")
            options["dtype" if new else "torch_dtype"] = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    return options


def _set_random_state(state: Any) -> None:
    """The caller's CPU state, or a seed for all devices, or None: leave it."""
    if isinstance(state, Tensor):
        torch.set_rng_state(state)
    elif state is not None:
        torch.manual_seed(state)


def _moved(value: Any, like: Any) -> Any:
    return value.to(like.device) if isinstance(value, Tensor) and isinstance(like, Tensor) else value


@contextmanager
def _no_progress_bar(pipe: Any) -> Iterator[None]:
    before = dict(getattr(pipe, "_progress_bar_config", {}))
    pipe.set_progress_bar_config(**{**before, "disable": True})
    try:
        yield
    finally:
        pipe._progress_bar_config = before
