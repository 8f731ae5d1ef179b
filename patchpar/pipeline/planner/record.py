"""One rank's program of a call under a plan, recorded without weights, without other ranks, and without computing.

    pipe = empty_pipeline(folder, options)
    rank = Recording(pipe, Plan.parse("cfg=2,patch=4"), {"prompt": "a fox"}).of_rank(3)
    rank.tape                       kernels with FLOPs and bytes, messages, waits, blocks and steps
    rank.peaks                      bytes of tensors beside the weights, by phase

What runs is the pipeline's own code on the meta device with the plan installed as on any rank, over a transport to
nobody. So no strategy is described a second time: what it sends is on the tape.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NoReturn

import torch
from torch import nn

from patchpar.errors import PlanError, UnsupportedModel
from patchpar.models.dry_run.dry_run import emptied, needs_values, on_the_cpu, with_few_steps
from patchpar.models.dry_run.live_bytes import LiveBytes
from patchpar.models.dry_run.meta_mode import KnownForms, MetaMode
from patchpar.models.info import denoisers_of
from patchpar.pipeline.encoder_placement import EncoderPlacement
from patchpar.pipeline.messages import CallOptions
from patchpar.pipeline.planner.recorded_encoders import EncodedValues, RecordedAbsence, RecordedTransfer
from patchpar.pipeline.planner.recorded_rank import RecordedRank
from patchpar.pipeline.planner.recording_transport import DEADLINE, RecordingCommunicator, RecordingTransport
from patchpar.pipeline.planner.tape_recorder import DECODE, ENCODE, TapeRecorder
from patchpar.pipeline.planner.token_plans import KnownTokens
from patchpar.pipeline.rank_stats import VAE, RankStats
from patchpar.pipeline.runner import PipelineRunner
from patchpar.pipeline.validate import check_plan_for
from patchpar.plan.mesh import Mesh
from patchpar.plan.plan import Plan
from patchpar.shard.encoders.one_rank import WaysOfEncoders
from patchpar.shard.hooks import HookSet
from patchpar.shard.kernels.fused_op import fused_without_values
from patchpar.shard.sdpa import SdpaMode
from patchpar.shard.transformer.denoiser import TokenDenoiser
from patchpar.shard.unet.denoiser import PatchedDenoiser
from patchpar.shard.unet.discover import ExchangeSites, splits_into_bands

DENOISE = "denoise"
STEPS = 4
"""Steps that are recorded: one exact, two until the values of two steps are known, and one that is like all others."""


@dataclass(slots=True)
class LearntFacts:
    """What the first call of a model finds: exchange points of UNets, and, by VAE and method, `SplitMethod.feeds`.

    `calls_by_branch`: guidance has a call for each branch, the first of which every rank makes; None if not known.
    """

    sites: dict[nn.Module, ExchangeSites] = field(default_factory=dict)
    feeds: dict[tuple[nn.Module, str], dict[str, bool]] = field(default_factory=dict)
    has_decoded: bool = False
    calls_by_branch: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordOptions:
    """How a call is recorded. It makes at most so many `steps`. `vae`, `exchange`: see `CallOptions`, `InstalledPlan`.

    `joined`: as on GPUs, with operations of several ranks at once, which NCCL has, and with fused kernels; without,
    as workers on a CPU. `tokens`: the token plans of transformers, which are found by values. `known`: forms of
    results, see MetaMode. `learnt`: what first calls have found. Recordings of one model may share both.
    """

    steps: int = STEPS
    vae: str = "auto"
    joined: bool = False
    tokens: KnownTokens = field(default_factory=KnownTokens)
    exchange: str = "on"
    known: KnownForms = field(default_factory=dict)
    learnt: LearntFacts = field(default_factory=LearntFacts)

    def with_steps(self, steps: int) -> "RecordOptions":
        """Return the options for calls of so many steps, which learn and know the same."""
        return replace(self, steps=steps)


class Recording:
    """Records the ranks of a plan. `pipe`: its networks are on the meta device afterwards; `kwargs`: of the call.

    Raises UnsupportedModel for a plan with a part that is found by values.
    """

    def __init__(self, pipe: Any, plan: Plan, kwargs: Mapping[str, Any], options: RecordOptions | None = None) -> None:
        _refuse_what_needs_values(plan)
        self.pipe, self.plan, self.options = pipe, plan, options or RecordOptions()
        self.kwargs = with_few_steps(pipe, kwargs, self.options.steps)
        self.networks: dict[str, nn.Module] = emptied(pipe)
        self._encoded = EncodedValues()

    def of_rank(self, rank: int) -> RecordedRank:
        """Record one rank.

        Raises PlanError for a rank that the plan has not, or arguments that do not go with it, and UnsupportedModel for
        a model that the plan cannot split, whose code needs values, or whose token plan is not known.
        """
        if not 0 <= rank < self.plan.world_size:
            raise PlanError(f"rank {rank} of plan {self.plan}: use 0 to {self.plan.world_size - 1}")
        first = rank - Mesh(rank, range(self.plan.world_size), **self.plan.degrees()).of_one_image().rank
        if self.plan.encoders == "one" and rank != first and not self._encoded.are_known:
            self.of_rank(first)
        tape, memory = TapeRecorder(), LiveBytes(ENCODE)
        mode = MetaMode(memory, tape.operator, self.options.known)
        context = RecordingContext(rank, max(2, self.plan.world_size), tape)
        transport = RecordingTransport(rank, tape, joined=self.options.joined)
        try:
            with ExitStack() as stack:
                if self.options.joined:
                    stack.enter_context(fused_without_values())
                for each in (on_the_cpu(self.pipe), torch.no_grad(), SdpaMode(mode.attend), mode):
                    stack.enter_context(each)
                hooks = stack.enter_context(HookSet())
                runner = _Runner(context, transport, self.options, self._encoded)
                self._note_phases(hooks, memory, tape)
                return self._recorded(runner, memory, tape)
        except (NotImplementedError, RuntimeError) as error:
            raise needs_values(self.pipe, error) from error

    def _recorded(self, runner: "_Runner", memory: LiveBytes, tape: TapeRecorder) -> RecordedRank:
        check_plan_for(runner.adopt(self.pipe), self.plan, self.kwargs)  # weights are divided at the first call
        options = CallOptions(plan=self.plan, verify=False, vae=self.options.vae, quiet=True)
        try:
            if not self._is_known:
                runner.generate(self.kwargs, options)
                runner.learn()
            runner.begin_recording(partial(memory.begin, ENCODE))
            runner.generate(self.kwargs, options)
            return RecordedRank(  # before weights are gathered to restore the networks
                rank=runner.context.rank,
                tape=tape.tape,
                peaks=dict(memory.peaks),
                weight_bytes={name: _weight_bytes(network, memory) for name, network in self.networks.items()},
            )
        finally:
            runner.restore()

    @property
    def _is_known(self) -> bool:
        """Whether the first call is like any other: nothing is to be learnt in it, and no weights are divided."""
        plan, learnt = self.plan, self.options.learnt
        bands = [each for each in denoisers_of(self.pipe).values() if splits_into_bands(each)]
        if plan.weights != "whole" or (plan.patch > 1 and not all(each in learnt.sites for each in bands)):
            return False
        if plan.cfg > 1 and learnt.calls_by_branch is not False:
            return False
        return plan.world_size == plan.data or learnt.has_decoded

    def _note_phases(self, hooks: HookSet, memory: LiveBytes, tape: TapeRecorder) -> None:
        def begin(*_: Any) -> None:
            memory.enter(DENOISE)
            memory.merge(DECODE, into=DENOISE)  # what followed the last call was a part of its step
            tape.denoiser()

        for denoiser in denoisers_of(self.pipe).values():
            hooks.before(denoiser, begin)
            hooks.after(denoiser, lambda *_: memory.enter(DECODE))


def _weight_bytes(network: nn.Module, memory: LiveBytes) -> int:
    """Return the bytes of the storages of weights that are not counted in `memory`, each once."""
    storages = {
        id(x.untyped_storage()): x.untyped_storage().nbytes()
        for x in (*network.parameters(), *network.buffers())
        if not memory.counts(x)
    }
    return sum(storages.values())


def _refuse_what_needs_values(plan: Plan) -> None:
    for wanted, what in ((plan.tensor > 1, "axis tensor"), (plan.stage > 1, "axis stage")):
        if wanted:
            raise UnsupportedModel(
                f"plan {plan} cannot be recorded: how {what} divides a model is found by values, which a recording has "
                "not; use patch, cfg, data or weights=sharded"
            )


class RecordingContext:
    """The RankContext of a rank that is recorded. Blocks and steps are noted in `tape`."""

    device = "cpu"
    deadline = wait_limit = DEADLINE
    links = None

    def __init__(self, rank: int, world_size: int, tape: TapeRecorder) -> None:
        self.rank, self.world_size, self._tape = rank, world_size, tape
        self.ranks, self.is_first = tuple(range(world_size)), rank == 0
        self.waiting: AbstractContextManager[None] = nullcontext()

    def emit(self, event: object) -> None:
        """See RankContext."""

    def ask(self, question: object) -> NoReturn:
        """See RankContext. Raises PlanError: there is no caller."""
        raise PlanError("a recorded call has no caller to ask: leave out what asks it")

    def pause_point(self) -> None:
        """See RankContext."""

    def beat(self, where: str) -> None:
        """See RankContext."""
        if where.startswith("step "):
            self._tape.step_ended()
        else:
            self._tape.block(where)


class _Runner(PipelineRunner):
    """The engine of a rank over a transport to nobody."""

    def __init__(
        self,
        context: RecordingContext,
        transport: RecordingTransport,
        options: RecordOptions,
        encoded: EncodedValues,
    ) -> None:
        super().__init__(context)
        ways = WaysOfEncoders(partial(RecordedTransfer, encoded=encoded), RecordedAbsence)
        self._encoders = EncoderPlacement(context.rank, self.device, self._communicator, ways)
        self._encoded = encoded
        self._transport = transport
        self._nowhere, self._options = transport, options
        self._begin: Callable[[], None] = lambda: None

    def _communicator(self) -> RecordingCommunicator:
        return RecordingCommunicator(self._nowhere)

    def learn(self) -> None:
        """Keep what a first call has found, for other ranks and plans."""
        for patched in self._installed.patched:
            if isinstance(patched, PatchedDenoiser) and patched.sites is not None:
                self._options.learnt.sites[patched.denoiser] = patched.sites
        if self._installed.guidance is not None:
            self._options.learnt.calls_by_branch = self._installed.guidance.has_calls_by_branch
        self._options.learnt.has_decoded |= self._installed.vaes is not None

    def begin_recording(self, begin: Callable[[], None]) -> None:
        """Record the calls from now on. `begin` is called when one begins."""
        self._begin = begin

    def _call_pipeline(self, kwargs: Mapping[str, Any], options: CallOptions) -> tuple[Any, RankStats]:
        """See PipelineRunner. A call that is made again, for images that all ranks need, is recorded again."""
        self._begin()
        self._encoded.begin()
        self._nowhere.tape.begin()
        return super()._call_pipeline(kwargs, options)

    def install(self, plan: Plan, **options: Any) -> None:
        """See PipelineRunner. Nothing is verified, and tokens are not searched, since there are no values."""
        super().install(plan, **options)
        installed, learnt = self._installed, self._options.learnt
        for patched in installed.patched:
            if isinstance(patched, TokenDenoiser):
                patched.use_plan(self._options.tokens.of(patched.denoiser))
            if isinstance(patched, PatchedDenoiser) and plan.weights == "whole":  # else more calls learn the order
                patched.sites = learnt.sites.get(patched.denoiser)
        if installed.vaes is not None:
            assert isinstance(installed.vaes.comm, RecordingCommunicator)
            installed.vaes.comm.only_kind = VAE
            for each in installed.vaes.vaes:
                for name, split in each.split.items():
                    split.feeds = learnt.feeds.setdefault((each.vae, name), split.feeds)
        if self._options.exchange != "on":
            installed.control(exchange=self._options.exchange, vae="on")
