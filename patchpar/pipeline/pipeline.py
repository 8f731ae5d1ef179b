"""`ParallelPipeline`: a diffusers pipeline on many devices, used like the pipeline itself.

    pipe = ParallelPipeline.from_pretrained("embedded", devices=2)
    image = pipe("a red house on the left, green hills at noon", generator=torch.manual_seed(0)).images[0]

With one device the rank runs in this process; with several this process starts a worker process for each; under
torchrun every process is a rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from patchpar.errors import PlanError
from patchpar.launch.executor import Executor
from patchpar.launch.hang_detection import LOAD_SECONDS
from patchpar.models.info import PipelineInfo, refuse_to_send_compiled
from patchpar.pipeline.auto_plan import Rule, choose
from patchpar.pipeline.call_placement import MAX_RETRIES, Adapters, CallPlacement, check_retries, checked_adapters
from patchpar.pipeline.caller import CallController
from patchpar.pipeline.component_proxy import QUESTIONS, ComponentProxy, on_all_ranks, refuse_method
from patchpar.pipeline.job import PipelineJob
from patchpar.pipeline.messages import Previews
from patchpar.pipeline.model_to_load import ModelInFiles, ModelInMemory, ModelToLoad
from patchpar.pipeline.observed_calls import ObservedCalls
from patchpar.pipeline.released_ranks import ReleasedRanks
from patchpar.pipeline.startup import PipelineOptions, check_options, check_request, plan_of, way_and_network
from patchpar.pipeline.state import PipelineState
from patchpar.pipeline.step_callbacks import with_callback_on_step_end
from patchpar.pipeline.suspended_call import SuspendedCall
from patchpar.pipeline.timed_plans import TimedPlans
from patchpar.pipeline.validate import bind, check_call, check_plan, warn_of_unknown_words
from patchpar.plan.plan import Plan


class ParallelPipeline(ObservedCalls, ReleasedRanks):
    """One diffusers pipeline on several devices.

    `pipe`: a pipeline in memory; with several devices each worker gets a copy, and `pipe` does not change. `devices`:
    "auto", 4, "cpu:4", "cuda" and others (docs/launching.md). `plan`: "auto", a `Plan`, or a text: "cfg=2,patch=2".
    `deadline`: seconds that a rank may make no progress. `start_method`: how CPU workers start, "forkserver" (from a
    process that has imported torch and diffusers), "spawn" (each anew), or "auto". `verify`: compare each split
    denoiser, and each VAE, with its plain forward when it is first used; a folder stores the results there instead of
    in the user's cache. `trusted_code`: names of modules or packages whose code in a denoiser is compared at its first
    call only, rather than whenever it does something new (docs/accuracy.md).
    `vae`: how several devices encode and decode (docs/parallel-vae.md). `graphs`: replay steady denoiser calls as CUDA
    graphs, by default on several GPUs (docs/graphs.md). `symmetric_memory`: small exchanges by one kernel.
    `secret_file`: a file with a secret, the same on all hosts, by which ranks on several hosts (of torchrun or a Ray
    cluster) know one another; they need it unless `trusted_network` says that nobody else can reach their network.

    Raises PlanError before any worker starts, LaunchError if workers fail.
    """

    def __init__(  # noqa: PLR0913 - each is a setting of its own, by name
        self,
        pipe: Any,
        *,
        devices: object = "auto",
        plan: Plan | str = "auto",
        deadline: float = 60.0,
        start_timeout: float = 600.0,
        start_method: str = "auto",
        verify: bool | Path = True,
        trusted_code: Iterable[str] = (),
        vae: str = "auto",
        graphs: bool | str | None = None,
        symmetric_memory: bool = False,
        secret_file: str | Path | None = None,
        trusted_network: bool = False,
    ) -> None:
        if not (hasattr(pipe, "components") and callable(pipe)):
            raise PlanError(f"{type(pipe).__name__} is no diffusers pipeline; pass a folder or name to from_pretrained")
        start = {"deadline": deadline, "start_timeout": start_timeout, "start_method": start_method, "vae": vae}
        start |= {"secret_file": secret_file, "trusted_network": trusted_network, "trusted_code": trusted_code}
        request = check_request(devices, plan, **start, verify=verify, graphs=graphs, symmetric_memory=symmetric_memory)
        if request.starts_workers:
            refuse_to_send_compiled(pipe.components)
        self._begin(request, ModelInMemory(pipe))
        self._state.progress = dict(getattr(pipe, "_progress_bar_config", None) or {})

    @classmethod
    def from_pretrained(  # noqa: PLR0913 - as above
        cls,
        model: str | Path,
        *,
        devices: object = "auto",
        plan: Plan | str = "auto",
        deadline: float = 60.0,
        start_timeout: float = 600.0,
        start_method: str = "auto",
        verify: bool | Path = True,
        trusted_code: Iterable[str] = (),
        vae: Any = "auto",
        graphs: bool | str | None = None,
        symmetric_memory: bool = False,
        secret_file: str | Path | None = None,
        trusted_network: bool = False,
        **options: Any,
    ) -> ParallelPipeline:
        """Load `model` (a folder, a hub name, or "embedded") on every rank; `options` go to diffusers' from_pretrained.

        Weights are loaded from safetensors only. A `vae` that is not a string is a network for the pipeline, as in
        diffusers. `task="image-to-image"` or `"inpainting"` loads its networks into a pipeline for that.
        Raises PlanError for a bad path, folder, weight file, plan, device, and a model that has code or does not fit.
        """
        vae, options = way_and_network(vae, options)
        start = {"deadline": deadline, "start_timeout": start_timeout, "start_method": start_method, "vae": vae}
        start |= {"secret_file": secret_file, "trusted_network": trusted_network, "trusted_code": trusted_code}
        request = check_request(devices, plan, **start, verify=verify, graphs=graphs, symmetric_memory=symmetric_memory)
        check_options(options)
        self = cls.__new__(cls)
        self._begin(request, ModelInFiles.of(model, options))
        return self

    def _begin(self, request: PipelineOptions, model: ModelToLoad) -> None:
        """Start the ranks, load or adopt the pipeline on each, and get its description."""
        weights = model.weights_for(request.devices.names, request.plan)
        object.__setattr__(self, "_state", PipelineState(request))
        state = self._state
        state.is_fresh, state.executor = model.is_fresh, request.executor()
        state.timed = TimedPlans.of(model, request.devices.names, request.graphs)
        try:
            state.weights = weights or model.weights_on(state.executor, request.devices.names)
            words, divides = model.arguments(request.plan or state.weights.plan), state.divides_weights
            results = state.executor.call(model.method, *words, replay=True, divides=divides, expected=LOAD_SECONDS)
            state.model = next(result for result in results if result is not None)
            if request.plan is not None:
                check_plan(state.model, request.plan)
        except BaseException:
            self.close()
            raise

    # --- a call -------------------------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the wrapped pipeline with all its arguments; returns the pipeline's output class.

        Under torchrun rank 0 returns the images, other ranks an output of the same class that holds None.
        Raises PlanError for an impossible call before any rank computes, the pipeline's own exceptions, and WorkerDied
        or WorkerHung if a rank fails (the next call restarts the workers).
        """
        return self._call(choose, args, kwargs)

    def submit(
        self,
        *args: Any,
        ranks: Sequence[int] | None = None,
        plan: Plan | str | None = None,
        previews: Previews | None = None,
        max_retries: int = MAX_RETRIES,
        resume: SuspendedCall | None = None,
        adapters: Mapping[str, float] | None = None,
        **kwargs: Any,
    ) -> PipelineJob:
        """Begin a call of the wrapped pipeline, and return at once: jobs on different ranks run at the same time.

        `ranks`: those that work on it, in the order of the mesh; None is all, or as many as the plan takes. `plan`:
        None is that of this pipeline, with "auto" the fastest one for `ranks`. Jobs with ranks in common run in order.
        Without a generator, the noise is of a seed that torch's default generator samples now. `previews`: who gets
        latents on the way. `max_retries`: how often it is made again after it has lost a worker, from the denoiser call
        that failed, by the ranks that are left. `resume`: what `suspend` of a job with the same arguments has returned.
        `adapters`: scales by name of those that act in this job alone; None is what `set_adapters` has selected.

        Raises PlanError for an impossible call, impossible ranks, arguments it cannot resume with, and under torchrun.
        """
        state, executor = self._state, self._executor
        if executor.kind == "torchrun":
            raise PlanError("submit() under torchrun: all processes make the same calls in order: call the pipeline")
        wanted = state.wanted if plan is None else plan_of(plan)
        named = None if ranks is None else executor.check_ranks(ranks)
        if plan is not None and wanted is not None:
            check_plan(self.description, wanted)
        placement = CallPlacement(rule=choose, plan=wanted, ranks=named, max_retries=check_retries(max_retries))
        acting = checked_adapters(adapters)
        job = self._job(placement, args, kwargs, previews=previews, resume=resume, adapters=acting)
        job.start()
        return job

    def _call(self, rule: Rule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the wrapped pipeline; `rule` chooses the plan if it is "auto"."""
        placement = CallPlacement(rule=rule, plan=self._state.wanted)
        return self._job(placement, args, kwargs, previews=self._state.previews).run_here()

    def _job(
        self,
        placement: CallPlacement,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        previews: Previews | None = None,
        resume: SuspendedCall | None = None,
        adapters: Adapters | None = None,
    ) -> PipelineJob:
        executor, known = self._executor, self.description
        placement.check(executor.world_size, weights=self._state.weights.plan)
        bound = bind(known, args, kwargs)
        check_call(known, bound)
        warn_of_unknown_words(known, bound)
        self._state.copies.warn_of_changes()
        given = bound if executor.kind == "inline" else with_callback_on_step_end(known, bound)
        caller = CallController(self, given, kind=executor.kind, output_module=known.module, previews=previews)
        caller.adapters = adapters
        if resume is not None:
            resume.hand_over(caller, known.pipeline)
        return PipelineJob(self._state, caller, placement)

    # --- attributes ---------------------------------------------------------------------------------------------

    @property
    def description(self) -> PipelineInfo:
        """Description of the pipeline: its class, the arguments of its call, the scale of its latents."""
        return self._state.described

    @property
    def plan(self) -> Plan | None:
        """The requested plan, or that of the latest call; None before the first call with "auto". Can be set."""
        return self._state.wanted or self._state.plan

    @plan.setter
    def plan(self, plan: Plan | str) -> None:
        wanted, state = plan_of(plan), self._state
        if wanted is not None:
            wanted.check_devices(self._executor.world_size)
            check_plan(self.description, wanted)
        state.wanted, state.plan, state.seconds_alone = wanted, None, {}  # a ratio is measured again

    def explain(self, job: PipelineJob | None = None) -> str:
        """Return devices, plan, and the reason for the plan: of the latest call, or of this job."""
        state = self._state
        plan, reason = self.plan, "as requested" if state.wanted else state.reason or "chosen at the first call"
        if job is not None:
            plan, reason = None if job.run is None else job.run.plan, job.reason
        return f"{state.request.devices.note}; plan {plan or 'auto'}: {reason}"

    def restore(self) -> None:
        """Remove all hooks: the pipeline runs as plain diffusers on the first device until `plan` is set."""
        self._executor.call("restore", divides=False)
        self._state.wanted, self._state.plan = Plan(), None

    def set_progress_bar_config(self, **config: Any) -> None:
        """Set options of the progress bar, as in diffusers. Under torchrun each process may set others."""
        self._state.progress = config

    def __getattr__(self, name: str) -> Any:
        """Methods of the pipeline and its networks run on all ranks; attributes are copies from rank 0."""
        if name.startswith(("__", *QUESTIONS)) or name == "_state":
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        caller = self._state.caller
        called_back = caller is not None and caller.in_callback
        does: Any = caller if called_back else self._state  # in a callback, the ranks do it after the callback
        if name in self.description.methods:
            refuse_method(name, world_size=self._executor.world_size)
            return on_all_ranks(self, name, does.apply)
        if name in self.description.networks and (called_back or self._executor.kind == "local"):
            return ComponentProxy(name, self.description.networks[name], does.ask, does.apply)
        return does.attribute(name) if called_back else does.read(name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Attributes of the pipeline, such as `scheduler`, are set on all ranks."""
        caller = self._state.caller
        if isinstance(getattr(type(self), name, None), property):
            object.__setattr__(self, name, value)
        elif caller is not None and caller.in_callback:
            caller.set_attribute(name, value)
        else:
            self._state.check_set(name, value)
            self._state.model = next(filter(None, self._executor.call("set", name, value, replay=name)))
            self._state.copies.forget(name)

    def __dir__(self) -> Iterable[str]:
        model = self._state.model
        return {*super().__dir__(), *(model.methods if model else ())}

    def __reduce__(self) -> str:
        return self._state.__reduce__()  # raises TypeError: a copy would have the same ranks

    def __repr__(self) -> str:
        if self._state.executor is None or (model := self._state.model) is None:
            return f"<{type(self).__name__}, closed>"
        return f"<{type(self).__name__} of {model.pipeline} on {self.explain()}>"

    @property
    def _executor(self) -> Executor:
        return self._state.ranks

    def close(self) -> None:
        """End the workers. Idempotent; also runs at exit. Under torchrun, `restore` before it frees your pipeline."""
        executor, self._state.executor = self._state.executor, None
        if executor is not None:
            executor.close()

    def __enter__(self) -> ParallelPipeline:
        _ = self._executor  # raises PlanError for a pipeline that is closed
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
