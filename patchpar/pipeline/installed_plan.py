"""A plan installed in a pipeline: hooks on its denoisers, VAEs in bands. Nothing else of the pipeline changes."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from types import MappingProxyType
from typing import Any

from diffusers.hooks import ModelHook
from torch import nn

from patchpar.comm.collectives import Communicator
from patchpar.comm.traffic import CommStats
from patchpar.models.info import denoisers_of, refuse_compiled
from patchpar.pipeline.conditioners import conditioners_of, hooks_on_conditioners, is_left_to_its_compiler
from patchpar.pipeline.denoiser_hook import DenoiserHook
from patchpar.pipeline.divided_networks import needs_no_values
from patchpar.pipeline.held_weights import Held
from patchpar.pipeline.installed_graphs import captured, recorder_of
from patchpar.pipeline.installed_weights import InstalledWeights, plain_calls_take_one_rank, ranks_of_plain_call
from patchpar.pipeline.known_denoisers import KnownDenoisers
from patchpar.pipeline.stats_recorder import StatsRecorder
from patchpar.pipeline.validate import refuse_without_denoiser
from patchpar.plan.exchange_policy import ExchangePolicy
from patchpar.plan.mesh import Mesh
from patchpar.plan.plan import Plan
from patchpar.plan.step_clock import StepClock
from patchpar.shard.denoiser import SharedDenoiser, WholeDenoiser
from patchpar.shard.graphs.recorder import StepRecorder
from patchpar.shard.graphs.step_graphs import StepGraphs
from patchpar.shard.guidance_branches import layers_by_branch
from patchpar.shard.hooks import HookSet, InstalledHook
from patchpar.shard.stages.denoiser import StagedDenoiser
from patchpar.shard.stages.patches import StagedPatches
from patchpar.shard.step_caches import CacheVote
from patchpar.shard.tensor.agreed_cache import agreed
from patchpar.shard.tensor.denoiser import TensorDenoiser
from patchpar.shard.unet.denoiser import PatchedDenoiser
from patchpar.shard.vae.parallel import ParallelVaes
from patchpar.shard.verification_cache import VerificationCache
from patchpar.shard.weights.restored import restore_all
from patchpar.strategies.cfg.split import GuidanceSplit
from patchpar.strategies.cfg.verify import GuidanceCheck
from patchpar.strategies.piped import PipedStages
from patchpar.strategies.structure.denoiser import HighResDenoiser
from patchpar.strategies.structure.options import StructureGuidance

HOOK = "patchpar_denoiser"


class InstalledPlan:
    """The hooks of a plan in a pipeline, until `restore`. Initially none: the pipeline runs on one rank.

    `held`: networks that are in shards already. `graphs`: whether steady denoiser calls are replayed as graphs, as
    `pipeline.graph_option` says. `known`: what another plan has found out about the denoisers.
    """

    def __init__(
        self,
        pipe: Any = None,
        held: Held = MappingProxyType({}),
        *,
        graphs: bool | str | None = False,
        known: KnownDenoisers | None = None,
    ) -> None:
        self.pipe, self._held, self._wanted = pipe, held, graphs
        self._recorder: StepRecorder | None = None
        self.known = KnownDenoisers() if known is None else known
        self.mesh: Mesh | None = None
        self.comm: Communicator | None = None
        self.patched: list[SharedDenoiser | HighResDenoiser | StagedDenoiser | StagedPatches] = []
        self.guidance: GuidanceSplit | None = None
        self.vaes: ParallelVaes | None = None
        self.weights: InstalledWeights | None = None
        self.tensors: list[TensorDenoiser] = []
        self._hooks = HookSet()
        self._hooked: list[InstalledHook] = []

    def install_denoisers(
        self,
        plan: Plan,
        mesh: Mesh,
        comm: Communicator,
        clock: StepClock,
        guided: Callable[[], bool | None],
        verifications: Any,
    ) -> None:
        """Make the denoisers parallel. `guided`: whether the current call uses guidance.

        Raises UnsupportedModel, and PlanError where graphs are required and cannot be.
        """
        refuse_without_denoiser(type(self.pipe).__name__, self._denoisers(), plan)
        self.mesh, self.comm = mesh, comm
        self._recorder = recorder_of(plan, self._wanted, comm.transport)
        verifications = agreed(verifications, (comm, mesh["tensor"]))
        if plan.cfg > 1:  # once for all networks, since several may take part in one step
            self.guidance = GuidanceSplit(comm, mesh["cfg"], clock, partial(layers_by_branch, self.pipe))
        if plan.weights != "whole":
            self.weights = InstalledWeights(self.pipe, plan, mesh, comm, self.guidance, self._held)
        for module in self._denoisers():
            layers: list[Any] = [] if self.guidance is None else [self.guidance]
            in_patches, check = self._in_patches(module, plan, clock, verifications), None
            if in_patches is not None and plan.stage == 1:
                layers.append(in_patches)
                self.patched.append(in_patches)
            if self.guidance is not None and verifications is not None:
                by_branch = partial(self.guidance.layers_of, module)
                takes_all = plan.stage > 1 or (plan.patch > 1 and any(conditioners_of(self.pipe)))
                together = mesh.of_one_image() if takes_all else None  # a plain forward runs stages, or gathers bands
                check = GuidanceCheck(module, (comm, mesh["cfg"]), clock, verifications, by_branch, together=together)
                check.carriers.alone &= plain_calls_take_one_rank(plan, self.weights)
            votes = CacheVote(module, comm, [mesh[name] for name in ("patch", "cfg", "data")], clock)
            hook = DenoiserHook(clock, layers, guided, votes, check, plan=plan)
            hook.watch_prompts(module, (comm, mesh.of_one_image()), mesh["data"], verifications)
            hook.weights, hook.pipe = self.weights, self.pipe
            self._divide_blocks(module, hook, plan, verifications, in_patches)
            self._register(module, hook)
        self._install_conditioners(plan, (comm, mesh), clock=clock, split=plan.split, verifications=verifications)

    def _in_patches(self, module: nn.Module, plan: Plan, clock: StepClock, verifications: Any) -> Any:
        """Return a denoiser divided over axis `patch`, or one that is whole and captured; None where it is neither."""
        assert self.mesh is not None
        assert self.comm is not None
        mesh = self.comm, self.mesh["patch"]
        options: dict[str, Any] = {"clock": clock, "verifications": verifications}
        if isinstance(plan.strategy, StructureGuidance):
            return plan.strategy.install(module, *mesh, pipe=self.pipe, **options)
        if plan.patch > 1:
            together = self.comm, ranks_of_plain_call(plan, self.mesh, self.weights)
            options["verifications"] = agreed(verifications, together, beyond=plan.patch)
            found = plan.strategy.install(module, *mesh, split=plan.split, **options)
            found.together = together
            self.known.pass_on(found, alone=plain_calls_take_one_rank(plan, self.weights))
        else:
            found = WholeDenoiser(module, mesh, ExchangePolicy(), **options) if self._recorder else None
        return captured(found, self._recorder, self._wanted)

    def _divide_blocks(
        self, module: nn.Module, hook: DenoiserHook, plan: Plan, verifications: Any, in_patches: Any
    ) -> None:
        assert self.mesh is not None
        assert self.comm is not None
        if self.mesh["tensor"].size > 1:
            if self.weights is not None:  # all ranks gather blocks for a search
                verifications = agreed(verifications, (self.comm, self.mesh.of_one_image()))
            hook.tensor = TensorDenoiser(module, (self.comm, self.mesh["tensor"]), verifications)
            hook.tensor.together = self.comm, self.mesh.of_one_image()
            self.tensors.append(hook.tensor)
        stages = self.comm, self.mesh["stage"]
        if isinstance(plan.strategy, PipedStages):
            piped = plan.strategy.install(module, *stages, clock=hook.clock, verifications=verifications)
            piped.in_bands = self.guidance is None  # which reads predictions at once
            hook.divide(piped)
            self.patched.append(piped)
        elif stages[1].size > 1:
            hook.stages = StagedDenoiser(module, stages, verifications)
            if in_patches is not None:
                hook.divide(StagedPatches(in_patches, hook.stages, (self.comm, self.mesh.of_one_branch())))
            self.patched.append(hook.divided or hook.stages)
        if hook.stages is not None:
            hook.stages.beside = tuple(self.pipe.components.values())

    def _install_conditioners(self, plan: Plan, mesh: tuple[Communicator, Mesh], **options: Any) -> None:
        bands = plan.tensor == 1 and any(isinstance(each, PatchedDenoiser) for each in self.patched)
        for module, hook in hooks_on_conditioners(self.pipe, plan, mesh, self.guidance, bands=bands, **options):
            if hook.in_bands is not None:
                self.known.pass_on(hook.in_bands, alone=True)
                captured(hook.in_bands, self._recorder, self._wanted and "auto")
                self.patched.append(hook.in_bands)
            self._register(module, hook)

    def install_vaes(self, mode: str, comm: Communicator, verifications: VerificationCache | None) -> None:
        """Let all ranks of one image encode and decode it together. `comm` counts their traffic separately."""
        assert self.mesh is not None
        axis = self.mesh.of_one_image()
        if axis.size > 1 or mode == "tiled":
            self.vaes = ParallelVaes(self.pipe.components, self._denoisers(), mode, (comm, axis), verifications)

    def _register(self, module: nn.Module, hook: ModelHook) -> None:
        self._hooked.append(self._hooks.install(module, hook, HOOK))

    def _denoisers(self) -> list[nn.Module]:
        return list(denoisers_of(self.pipe).values())

    def uninstall(self) -> Held:
        """Remove all hooks; return the networks that stay in shards, for another plan. Raises ExchangeError."""
        self.known.keep(self.patched)
        for each in (*self.patched, *self.tensors):
            each.restore()
        held, self._held = self._held if self.weights is None else self.weights.end(), {}
        self._hooks.close()
        if self.vaes is not None:
            self.vaes.restore()
        self.mesh = self.comm = self.guidance = self.vaes = self.weights = None
        self.patched, self.tensors, self._hooked = [], [], []
        return held

    def restore(self) -> None:
        """Uninstall, and make all weights whole: the pipeline is as before. Raises as `uninstall`."""
        restore_all(filter(None, self.uninstall().values()))

    def forget(self, method: str = "") -> None:
        """Discard what is known of the pipeline's modules, which `method` may change now; make their weights whole.

        Not for a method that needs no values of weights.
        """
        self.known.forget()
        for patched in self.patched:
            patched.forget()
        self._gather_weights(method)
        if self.vaes is not None:
            self.vaes.forget()

    def open_up(self) -> None:
        """Remove the denoisers' exchange points before a callback changes them. The next call analyses them again."""
        for patched in self.patched:
            shared = patched.team if isinstance(patched, HighResDenoiser) else patched
            if shared is not None:
                shared.restore()
                shared.unsure = True
        self._gather_weights()
        if self.vaes is not None:
            self.vaes.forget()

    def _gather_weights(self, method: str = "") -> None:
        if self.weights is not None and self.guidance is not None:
            self.guidance.catch_up()
        for tensor in self.tensors:
            tensor.restore()
        if self.weights is None:
            return
        if self.guidance is not None:  # calls are verified again, which other ranks cannot follow
            self.guidance.forget()
        if not needs_no_values(method):
            self.weights.gather()

    @property
    def is_for_large_images(self) -> bool:
        """Whether images are made of patches by structure guidance, which may compute only some guidance branches."""
        return any(isinstance(patched, HighResDenoiser) for patched in self.patched)

    def begin(
        self, *, tracing: bool, watched: bool = False, previewed: bool = False, call: Any = MappingProxyType({})
    ) -> StatsRecorder:
        """Begin an image; see `HighResDenoiser.expect`. Raises UnsupportedModel, PlanError, ExchangeError."""
        self._hooked = [each for each in self._hooked if not is_left_to_its_compiler(each)]
        for hooked in self._hooked:
            refuse_compiled(hooked.module)
            if isinstance(hooked.hook, DenoiserHook):
                hooked.hook.begin(watched=watched, call=call)
            if not hooked.is_reached:
                hooked.reinstall()
        if self.weights is not None:
            self.weights.begin()
        if self.guidance is not None:
            self.guidance.reset()
        for patched in self.patched:
            if isinstance(patched, HighResDenoiser):
                patched.expect(call, watched=watched, previewed=previewed)
            patched.reset()
        traffic = CommStats() if self.comm is None else self.comm.traffic
        of_vaes = CommStats() if self.vaes is None else self.vaes.comm.traffic
        traffic.clear()
        of_vaes.clear()
        stale_states = [patched.history for patched in self.patched if patched.history is not None]
        graphs = self._graphs(paused=tracing)  # a trace has every exchange of a step
        return StatsRecorder(traffic, stale_states, tracing=tracing, of_vaes=of_vaes, graphs=graphs)

    def _graphs(self, *, paused: bool) -> list[StepGraphs]:
        found = [each.graphs for each in self.patched if isinstance(each, SharedDenoiser) and each.graphs]
        for graphs in found:
            graphs.paused = paused
        return found

    @contextmanager
    def running(self, *, watched: bool = False) -> Iterator[None]:
        """Context of a call of the pipeline, `watched` by a callback or not. Calls outside of it replay nothing."""
        with ExitStack() as stack:
            stack.callback(self._graphs, paused=True)
            yield None if self.vaes is None else stack.enter_context(self.vaes.state.open(watched=watched))

    def interrupted(self) -> AbstractContextManager[None]:
        """Return the context of a function of the caller within the call."""
        return nullcontext() if self.vaes is None else self.vaes.state.interrupted()

    def finish(self) -> None:
        """End an image: receive pending messages. Raises ExchangeError."""
        if self.guidance is not None:
            self.guidance.finish()
        for patched in self.patched:
            patched.finish()
        if self.weights is not None:
            self.weights.finish()

    def control(self, *, exchange: str, vae: str) -> None:
        """Set the exchange between bands to "off" or "frozen", which gives wrong images, for negative controls."""
        for patched in (*self.patched, *self.tensors):
            patched.exchange = exchange
        if self.vaes is not None:
            self.vaes.control(exchange=vae)
