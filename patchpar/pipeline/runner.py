"""The engine of one rank: holds the diffusers pipeline, makes its denoiser parallel, runs its own loop unchanged.

    load / adopt     a pipeline from a folder or the hub, or one in memory
    install          the plan: a hook on every denoiser, every VAE in bands; nothing else of the pipeline changes
    generate         one call of the pipeline, the same on every rank
    apply            any other method or attribute of the pipeline, on every rank
    restore          remove every hook

Only the denoiser call is replaced, so that schedulers, callbacks, LoRA and post-processing are diffusers' own.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any

import torch
from packaging.version import Version
from torch import nn

from patchpar.comm.transport import form_groups, watched
from patchpar.launch.executor import IdleRank, RankContext
from patchpar.launch.host_memory import FreeMemory
from patchpar.models.info import PipelineInfo
from patchpar.models.ip_adapters import with_checked_sources
from patchpar.models.loading import prepare_pipeline
from patchpar.models.quiet_libraries import silence_libraries
from patchpar.pipeline.adapter_selection import AdapterSelection
from patchpar.pipeline.call_recorder import recorder_for
from patchpar.pipeline.caller_values import holds_network, of_method_on, refuse_networks
from patchpar.pipeline.description import described, has_its_networks, set_by_attributes, set_if_described
from patchpar.pipeline.encoder_placement import EncoderPlacement
from patchpar.pipeline.failed_methods import done_or_undone
from patchpar.pipeline.held_weights import HeldWeights, refuse_without_memory, warn_without_room
from patchpar.pipeline.installed_graphs import needs_hooks
from patchpar.pipeline.installed_plan import InstalledPlan
from patchpar.pipeline.messages import CallOptions, CallResult, MethodResult, RandomState
from patchpar.pipeline.pipeline_call import PipelineCall
from patchpar.pipeline.rank_connection import RankConnection
from patchpar.pipeline.rank_random import MethodRandom, own_part, random_state, shared_noise, taken_random_state
from patchpar.pipeline.rank_stats import RankStats
from patchpar.pipeline.set_network import refuse_as_denoiser
from patchpar.pipeline.state_changes import change_of
from patchpar.pipeline.step_callbacks import OLDER, ON_STEP_END
from patchpar.pipeline.torchrun_sync import TorchrunSync
from patchpar.pipeline.validate import check_pipeline, is_offloaded
from patchpar.pipeline.whole_weights import make_whole_for
from patchpar.plan.mesh import rank_sets
from patchpar.plan.plan import Plan
from patchpar.plan.step_clock import StepClock
from patchpar.shard.compiled import COMPILES_BLOCKS, ONE_GRAPH_FOR_ALL, unify_processors
from patchpar.shard.generator_states import GeneratorStates
from patchpar.shard.generators import generators_of
from patchpar.shard.torch_switches import TorchModes
from patchpar.shard.vae.parallel import OutputNeeded
from patchpar.shard.verification_cache import VerificationCache
from patchpar.strategies.cfg.split import guidance_of, refuse_perturbed


class PipelineRunner:
    """One rank's pipeline."""

    def __init__(self, context: RankContext, connection: RankConnection | None = None) -> None:
        self.context, self.device = context, torch.device(context.device)
        self.clock = StepClock()
        self.pipe: Any = None
        self._described: Any = None  # a PipelineInfo, with the pipeline
        self._installed = InstalledPlan()
        self._installed_for, self._installation = CallOptions(plan=Plan()).to_install, 0
        self._connection = connection or RankConnection(context)
        self._encoders = EncoderPlacement(context.rank, self.device, self._connection.communicator)
        self._held = HeldWeights(context.rank, self.device, self._connection.communicator)
        self._adapters, self._arguments = AdapterSelection(), dict[str, Any]()
        if context.world_size > 1:  # before a model arrives: unpickling it imports libraries that print
            silence_libraries()

    # --- the pipeline -------------------------------------------------------------------------------------------

    def free_memory(self, *, everywhere: bool = False, releases: bool = False) -> FreeMemory:
        """Return what is free for a model on this rank; with `everywhere`, the least of all ranks, on all of them.

        `releases`: after torch has given back what it keeps of freed memory.
        """
        return self._held.free_memory(self.context.world_size, everywhere=everywhere, releases=releases)

    def load(
        self, model: str, options: Mapping[str, Any], weight_bytes: int = 0, plan: Plan | None = None
    ) -> PipelineInfo:
        """Load onto this rank's device, from safetensors only, what it holds by `plan` of encoders and blocks.

        Raises PlanError before loading if memory is short.
        """
        refuse_without_memory(self.device, weight_bytes, model, options, plan or Plan(patch=self.context.world_size))
        if self.context.rank == 0 and plan is not None:
            warn_without_room(self.device, weight_bytes, model, options, plan)
        self.restore()
        pipe = self._held.load(model, options, plan)
        self._encoders.arrange(pipe, plan)
        return self._use(pipe.to(self.device))

    def adopt(self, pipe: Any, plan: Plan | None = None) -> PipelineInfo:
        """Use a pipeline in memory. Raises UnsupportedModel for an offloaded, spread, parallel or compiled one."""
        check_pipeline(pipe, self.context.world_size)
        self.restore()
        self._encoders.arrange(pipe, plan)
        in_shards = self._held.hold(pipe, plan)
        stays = is_offloaded(pipe) or (pipe.device == self.device and not in_shards)
        return self._use(pipe if stays else pipe.to(self.device))

    def _use(self, pipe: Any) -> PipelineInfo:
        prepare_pipeline(pipe)
        self.pipe, self._described = pipe, described(pipe)
        return self._described

    def apply(
        self,
        name: str,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        *,
        everywhere: bool = False,
        random: RandomState | None = None,
        modes: TorchModes | None = None,
    ) -> MethodResult:
        """Call a method of the pipeline, or "vae.method" of a network, without exchange points: it may replace modules.

        The result is returned by the first rank, or with `everywhere`, where every rank has its own caller, by all.
        `random`, `modes`: see CallOptions. Raises what it does, UnsupportedModel for a returned network.
        """
        if everywhere and self.context.world_size > 1:  # under torchrun each process has a random state of its own
            TorchrunSync(self.context, self.device, kwargs, args).begin()
        self._adapters.leave()
        make_whole_for(self.pipe, name, args, kwargs, self._installed, self._held)
        self._encoders.give_back_for(name)
        method = attrgetter(name)(self.pipe)
        if name.endswith(f".{COMPILES_BLOCKS}") and Version(torch.__version__) < ONE_GRAPH_FOR_ALL:
            unify_processors(method.__self__)
        args, kwargs = of_method_on(self.device, name, *with_checked_sources(method, args, kwargs))
        with (modes or TorchModes()).on(self.device.type), MethodRandom(random, self.device) as sampled:
            result = done_or_undone(self.pipe, name, method, args, kwargs)
        states = tuple(each.get_state() for each in generators_of(kwargs, args))
        found = MethodResult(described=self._described_anew(), generators=states, random=sampled.after)
        if result is getattr(method, "__self__", self.pipe):
            return replace(found, itself=True)
        if not everywhere and change_of(name, (), {}) and holds_network(result):
            return found  # None: what is changed stays, on ranks that start later too
        return replace(found, value=result if everywhere else self._sent(f"what {name}() returned", result))

    def set(self, name: str, value: Any, *, everywhere: bool = False) -> PipelineInfo:
        """Set an attribute of the pipeline, or "vae.attribute" of a network; return the description of the pipeline."""
        owner, _, attribute = name.rpartition(".")
        refuse_as_denoiser(name, value, is_alone=self.context.world_size == 1)
        if owner or isinstance(value, nn.Module):  # which may replace a hooked module; the next call installs hooks
            self.restore(name.partition(".")[0])
        with set_if_described(attrgetter(owner)(self.pipe) if owner else self.pipe, attribute, value, name):
            anew = self._described_anew(always=isinstance(value, nn.Module))  # which may be of other sizes
            return anew or replace(self._described, **set_by_attributes(self.pipe))

    def _described_anew(self, *, always: bool = False) -> PipelineInfo | None:
        """Return the description of the pipeline, or None if its networks are of the same classes as before."""
        if not always and (self._described is None or has_its_networks(self.pipe, self._described)):
            return None
        self._described = found = described(self.pipe)
        return found

    def get(self, name: str, *, everywhere: bool = False) -> Any:
        """Return an attribute on the first rank, or with `everywhere` on all. Raises UnsupportedModel for a network."""
        value = attrgetter(name)(self.pipe)
        return value if everywhere else self._sent(f"pipe.{name}", value)

    def _sent(self, what: str, value: Any) -> Any:
        """Return `value` on the first rank, for the caller. Raises UnsupportedModel for what holds a network."""
        refuse_networks(what, value)
        return value if self.context.is_first else None

    # --- the plan -----------------------------------------------------------------------------------------------

    def install(self, plan: Plan, **options: Any) -> None:
        """Make denoisers and VAEs parallel; other ranks than the plan's stay idle. `options`: of CallOptions."""
        self._uninstall()
        wanted, self._installed_for = CallOptions(plan=plan, **options), {}  # until it is done
        mesh, held = plan.mesh(self.context.rank, wanted.members), self._held.take(plan, wanted.members)
        one_rank = plan.strategy.for_one_rank or plan.weights == "hosted"
        works = plan.world_size > 1 or one_rank or wanted.vae == "tiled" or needs_hooks(self.pipe, wanted, self.device)
        if self.context.world_size > 1 or works:
            watched(self._connection.connected(), self.context)  # whose limit may have been that of loading
        if self._connection.transport is not None:  # also on ranks that stay idle
            self.form(plan, wanted.members, symmetric_memory=wanted.symmetric_memory)
        if mesh is not None and works:
            verifications = VerificationCache.of(wanted.verify, wanted.trusted_code)
            communicators = [self._connection.communicator() for _ in ("denoisers", "VAEs")]
            self._installed = InstalledPlan(self.pipe, held, graphs=wanted.graphs, known=self._installed.known)
            self._installed.install_denoisers(plan, mesh, communicators[0], self.clock, self._guided, verifications)
            self._installed.install_vaes(wanted.vae, communicators[1], verifications)
        self._installed_for = wanted.to_install

    def form(self, plan: Plan, ranks: Sequence[int], *, symmetric_memory: bool = False) -> None:
        """Prepare operations of several ranks for a plan on `ranks`. Collective: also on ranks that it leaves idle."""
        sets = rank_sets(ranks, **plan.degrees())
        form_groups(self._connection.connected(), sets, symmetric_memory=symmetric_memory)

    def restore(self, component: str = "") -> None:
        """Remove every hook, and give all ranks encoders and weights, or this component: it is as before `install`."""
        self._adapters.leave()
        self._uninstall()
        self._held.give_back(getattr(self.pipe, component, component) if component else None)
        self._encoders.give_back_for(f"{component}." if component else "")

    def _uninstall(self) -> None:
        self._held.keep(self._installed.uninstall())
        self._installed_for = CallOptions(plan=Plan()).to_install

    def control(self, *, exchange: str = "on", vae: str = "on", encoders: str = "on") -> None:
        """Set the exchange between bands to "off" (denoisers also "frozen"), which gives wrong images, for controls."""
        self._installed.control(exchange=exchange, vae=vae)
        self._encoders.control(encoders)

    def _guided(self) -> bool | None:
        if self._installed.is_for_large_images:
            refuse_perturbed(self.pipe, self._arguments)
        return guidance_of(self.pipe, self._arguments)

    # --- a call -------------------------------------------------------------------------------------------------

    def generate(self, kwargs: Mapping[str, Any], options: CallOptions) -> CallResult | IdleRank:
        """Run one call of the pipeline with `options.plan`. Ranks that the plan does not use return IdleRank."""
        if self.context.world_size > 1 and self._connection.reach():
            self._uninstall()  # messages may have been lost
        self._adapters.choose(self.pipe, options.adapters, self._installed, self._encoders)
        if self._installation != options.installation:
            self._uninstall()
            self._installation = options.installation
        if self._installed_for != options.to_install or self._held.is_divided:
            self.install(**options.to_install)
        self._encoders.arrange(self.pipe, options.plan, options.members)
        if options.same_everywhere:
            return self._run_under_torchrun(kwargs, options)
        is_callers = self.context.world_size == 1
        with taken_random_state(self.pipe, kwargs, options, self.device, is_callers=is_callers) as kwargs:
            if self.context.rank not in options.members:
                return IdleRank()
            output, figures, mesh = *self._run(kwargs, options), self._installed.mesh
            is_equal = mesh is not None and mesh.of_one_image().rank > 0  # to another rank's
            return self._report(None if is_equal else output, (figures,), options)

    def _run_under_torchrun(self, kwargs: Mapping[str, Any], options: CallOptions) -> CallResult | IdleRank:
        """Run a call where every process has its own caller."""
        sync = TorchrunSync(self.context, self.device, kwargs)
        sync.begin()
        if self.context.rank >= options.plan.world_size:
            return sync.stand_by()
        try:
            output, own = self._run(kwargs, options)
        except Exception:
            if options.plan.world_size < self.context.world_size:
                sync.release()
            raise
        mesh, comm = self._installed.mesh, self._installed.comm
        figures = sync.figures(own, mesh, comm)
        output = sync.end(output, mesh["data"] if mesh else None, comm)
        return self._report(output, figures, options)

    def _run(self, kwargs: Mapping[str, Any], options: CallOptions) -> tuple[Any, RankStats]:
        """Return this rank's output and statistics."""
        installed, random = self._installed, GeneratorStates(kwargs, self.device)
        try:
            return self._call_pipeline(kwargs, options)
        except OutputNeeded:  # at most once for a pipeline, which needs its decoded images on all ranks
            assert installed.vaes is not None
            installed.vaes.state.everywhere = True
            random.restore()
            return self._call_pipeline(kwargs, options)

    def _call_pipeline(self, kwargs: Mapping[str, Any], options: CallOptions) -> tuple[Any, RankStats]:
        installed = self._installed
        self.clock.reset(order=getattr(getattr(self.pipe, "scheduler", None), "order", 1))
        watched = options.has_callback or any(kwargs.get(name) is not None for name in (ON_STEP_END, OLDER))
        recorder = installed.begin(tracing=options.tracing, watched=watched, previewed=options.previewed, call=kwargs)
        call = PipelineCall(self.pipe, self.context, self.clock, options, recorder, installed)
        call.changing, call.calls = self._before_changes, recorder_for(self.pipe, options, installed, self.context)
        mesh, noise = installed.mesh, shared_noise(options, installed.mesh, installed.comm, self.device)
        with own_part(self.pipe, dict(kwargs), mesh, noise) as self._arguments, installed.running(watched=watched):
            output = call.run(self._arguments)
        recorder.end_image()
        installed.finish()
        if (transport := self._connection.transport) is not None:
            transport.settle("end of the call")
        return output, recorder.figures(self.context.rank, self.context.device)

    def _before_changes(self) -> None:
        self._installed.open_up()
        self._encoders.give_back()

    def _report(self, output: Any, figures: tuple[RankStats, ...], options: CallOptions) -> CallResult:
        return CallResult(
            output=output,
            generators=tuple(generator.get_state() for generator in generators_of(self._arguments)),
            random=random_state(self.device) if options.random and options.random.cpu is not None else None,
            figures=figures,
        )
