"""What a rank runs that is recorded: a pipeline runner over a transport without other ranks, and without values."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NoReturn

from patchpar.errors import PlanError
from patchpar.pipeline.encoder_placement import EncoderPlacement
from patchpar.pipeline.messages import CallOptions
from patchpar.pipeline.planner.cuts_without_values import CutsWithoutValues
from patchpar.pipeline.planner.noted_decoding import Decoding
from patchpar.pipeline.planner.record_options import RecordOptions, makes_known_calls
from patchpar.pipeline.planner.recorded_encoders import EncodedValues, RecordedAbsence, RecordedTransfer
from patchpar.pipeline.planner.recording_transport import DEADLINE, RecordingCommunicator, RecordingTransport
from patchpar.pipeline.planner.tape_recorder import TapeRecorder
from patchpar.pipeline.planner.unchanged_network import UnchangedNetwork
from patchpar.pipeline.rank_connection import RankConnection
from patchpar.pipeline.rank_stats import VAE, RankStats
from patchpar.pipeline.runner import PipelineRunner
from patchpar.plan.plan import Plan
from patchpar.shard.denoiser import SharedDenoiser
from patchpar.shard.encoders.one_rank import WaysOfEncoders
from patchpar.shard.piped.on_stages import PipedOnStages
from patchpar.shard.stages.denoiser import StagedDenoiser
from patchpar.shard.stages.patches import StagedPatches
from patchpar.shard.transformer.denoiser import TokenDenoiser
from patchpar.shard.unet.denoiser import PatchedDenoiser


class RecordingContext:
    """The RankContext of a rank that is recorded. Blocks and steps are noted in `tape`."""

    device = "cpu"
    deadline = wait_limit = DEADLINE
    links = None
    seal = None

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


class RecordingConnection(RankConnection):
    """A transport without other ranks."""

    def __init__(self, context: RecordingContext, transport: RecordingTransport) -> None:
        super().__init__(context)
        self.transport = self._nowhere = transport

    def communicator(self) -> RecordingCommunicator:
        """See RankConnection."""
        return RecordingCommunicator(self._nowhere)


class RecordingRunner(PipelineRunner):
    """What a rank runs, over a transport without other ranks. `attend`: exact attention between them."""

    def __init__(
        self,
        context: RecordingContext,
        transport: RecordingTransport,
        options: RecordOptions,
        encoded: EncodedValues,
        attend: Callable[..., Any],
    ) -> None:
        super().__init__(context, RecordingConnection(context, transport))
        ways = WaysOfEncoders(partial(RecordedTransfer, encoded=encoded), RecordedAbsence)
        self._encoders = EncoderPlacement(context.rank, self.device, self._connection.communicator, ways)
        self._encoded = encoded
        self._tape, self._options, self._attend = transport.tape, options, attend
        self._begin: Callable[[], None] = lambda: None
        self._makes_known_calls = False
        self.stale_bytes = 0
        """Of the call made last; see `RankStats`."""
        self.was_first = False
        """Whether that had calls for one guidance branch whose results were not known before."""

    def learn(self) -> None:
        """Keep what a first call has found, for other ranks and plans."""
        for part in _parts_of(self._installed.patched):
            if isinstance(part, PatchedDenoiser) and part.sites is not None:
                self._options.learnt.sites[part.denoiser] = part.sites
        guidance, learnt = self._installed.guidance, self._options.learnt
        if guidance is not None:
            learnt.calls_by_branch = bool(guidance.forms)
            if self._makes_known_calls:
                learnt.forms.update(guidance.forms)
        self._options.learnt.has_decoded |= self._installed.vaes is not None

    def decode(self, decodings: Iterable[Decoding], options: CallOptions) -> None:
        """Decode what a call decodes, without the rest of it, so that the VAEs are as after a first call."""
        self.install(**options.to_install)
        with self._installed.running():
            for each in decodings:
                each.again()

    def begin_recording(self, begin: Callable[[], None]) -> None:
        """Record the calls from now on. `begin` is called when one begins."""
        self._begin = begin

    def _call_pipeline(self, kwargs: Mapping[str, Any], options: CallOptions) -> tuple[Any, RankStats]:
        """See PipelineRunner. A call that is made again, for images that all ranks need, is recorded again."""
        self._begin()
        self._encoded.begin()
        self._tape.begin()
        guidance = self._installed.guidance
        known = 0 if guidance is None else len(guidance.forms)
        output, stats = super()._call_pipeline(kwargs, options)
        self.was_first = guidance is not None and len(guidance.forms) > known
        self.stale_bytes = stats.stale_bytes
        return output, stats

    def install(self, plan: Plan, **options: Any) -> None:
        """See PipelineRunner. Nothing is verified, and tokens are not searched, since there are no values."""
        super().install(plan, **options)
        self._makes_known_calls = makes_known_calls(plan)
        if self._installed.guidance is not None and self._makes_known_calls:
            self._installed.guidance.forms.update(self._options.learnt.forms)
        for part in _parts_of(self._installed.patched):
            self._prepare(part, plan)
        for tensor in self._installed.tensors:
            tensor.plan = self._options.features.of(tensor.denoiser, plan.tensor)
        self._prepare_vaes()
        if self._options.exchange != "on":
            self._installed.control(exchange=self._options.exchange, vae="on")

    def _prepare(self, part: Any, plan: Plan) -> None:
        """Give a part of a denoiser what real ranks find by values, or at their first call."""
        learnt = self._options.learnt
        if isinstance(part, SharedDenoiser):
            part.patch.attend = self._attend
            part.watched = UnchangedNetwork(part.denoiser, learnt.fingerprints)
        if isinstance(part, TokenDenoiser):
            if part.denoiser not in learnt.tokens:
                learnt.tokens[part.denoiser] = self._options.tokens.of(part.denoiser)
            part.use_plan(learnt.tokens[part.denoiser])
        if isinstance(part, PatchedDenoiser) and plan.weights == "whole":  # else more calls learn the order
            part.sites = learnt.sites.get(part.denoiser)
        if isinstance(part, StagedDenoiser):
            part.find_cuts = CutsWithoutValues

    def _prepare_vaes(self) -> None:
        vaes = self._installed.vaes
        if vaes is None:
            return
        assert isinstance(vaes.comm, RecordingCommunicator)
        vaes.comm.only_kind = VAE
        for each in vaes.vaes:
            for name, split in each.split.items():
                split.feeds = self._options.learnt.feeds.setdefault((each.vae, name), split.feeds)


def _parts_of(patched: Iterable[Any]) -> Iterator[Any]:
    """Yield denoisers, and of those in stages also what computes patches, and the stages."""
    for each in patched:
        yield each
        if isinstance(each, StagedPatches):
            yield each.patched
        if isinstance(each, (StagedPatches, PipedOnStages)):
            yield each.stages
