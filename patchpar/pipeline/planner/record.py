"""One rank's program of a call under a plan, recorded without weights, without other ranks, and without computing.

    pipe = empty_pipeline(folder, options)
    rank = Recording(pipe, Plan.parse("cfg=2,patch=4"), {"prompt": "a fox"}).of_rank(3)
    rank.tape                       kernels with FLOPs and bytes, messages, waits, blocks and steps
    rank.peaks                      bytes of tensors beside the weights, by phase
    rank.working                    the same with buffers of kernels

What runs is the pipeline's own code on the meta device with the plan installed as on any rank, over a transport
without other ranks. So no strategy is described a second time: what it sends is on the tape.
"""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from patchpar.comm.kernels.fused_op import fused_without_values
from patchpar.errors import PlanError
from patchpar.models.dry_run.dry_run import (
    emptied,
    needing_values,
    on_the_cpu,
    weight_bytes,
    weight_tensors,
    with_few_steps,
)
from patchpar.models.dry_run.live_bytes import LiveBytes
from patchpar.models.dry_run.meta_mode import MetaMode
from patchpar.models.dry_run.plan_memory import SLOTS
from patchpar.models.encoders import encoders_of
from patchpar.models.info import denoisers_of
from patchpar.pipeline.conditioners import conditioners_of
from patchpar.pipeline.messages import CallOptions
from patchpar.pipeline.planner.call_log import CallLog, LoggedBytes, LoggedTape
from patchpar.pipeline.planner.derived_ranks import LoggedRanks
from patchpar.pipeline.planner.image_ranks import ImageRanks, ranks_of_image
from patchpar.pipeline.planner.noted_decoding import note_decodings
from patchpar.pipeline.planner.record_options import RecordOptions, makes_known_calls
from patchpar.pipeline.planner.recorded_encoders import EncodedValues
from patchpar.pipeline.planner.recorded_rank import RecordedRank
from patchpar.pipeline.planner.recording_runner import RecordingContext, RecordingRunner
from patchpar.pipeline.planner.recording_transport import RecordingTransport
from patchpar.pipeline.planner.repeated_blocks import RepeatedBlocks
from patchpar.pipeline.planner.repeated_encoders import RepeatedEncoders
from patchpar.pipeline.planner.tape_recorder import DECODE, ENCODE, TapeRecorder
from patchpar.pipeline.validate import check_plan_for
from patchpar.plan.mesh import Mesh
from patchpar.plan.plan import Plan
from patchpar.shard.hooks import HookSet
from patchpar.shard.unet.discover import splits_into_bands
from patchpar.shard.weights.packed import blocks_of

DENOISE = "denoise"


class Recording:
    """Records the ranks of a plan. `pipe`: its networks are on the meta device afterwards; `kwargs`: of the call.

    `logged`: ranks of the same model and call, recorded with the same options; others are derived from them.

    Stages with hosted weights have the programs of whole ones: after the first call their blocks are on the device.
    Other hosted blocks are copied to slots in every call, which is on the tape.
    """

    def __init__(
        self,
        pipe: Any,
        plan: Plan,
        kwargs: Mapping[str, Any],
        options: RecordOptions | None = None,
        logged: LoggedRanks | None = None,
    ) -> None:
        self.pipe, self.options, self._logged = pipe, options or RecordOptions(), logged
        self._plan = plan
        self._is_hosted = plan.weights == "hosted" and plan.stage > 1
        self.plan = replace(plan, weights="whole", resident=0) if self._is_hosted else plan
        self.kwargs = with_few_steps(pipe, kwargs, self.options.steps)
        self.networks: dict[str, nn.Module] = emptied(pipe)
        self._encoded = EncodedValues()

    def of_image(self) -> ImageRanks:
        """Record the ranks of the first image. Raises what `of_rank` raises, PlanError if ranks do not match."""
        found = ranks_of_image(self._plan, self.of_rank)
        if self._logged is not None and self.options.joined:
            alike = self.options.learnt.calls_by_branch is False
            self._logged.keep_sources(found, self.options.steps, branches_are_alike=alike)
        return found

    def of_rank(self, rank: int) -> RecordedRank:
        """Record one rank.

        Raises PlanError for a rank that the plan has not, or arguments that do not go with it, and UnsupportedModel for
        a model that the plan cannot split, whose code needs values, or whose token or feature plan is not known.
        """
        if not 0 <= rank < self.plan.world_size:
            raise PlanError(f"rank {rank} of plan {self.plan}: use 0 to {self.plan.world_size - 1}")
        derived = self._derived(rank)
        return self._of_rank(rank) if derived is None else derived

    def _of_rank(self, rank: int) -> RecordedRank:
        self._find_before(rank)
        log = CallLog()
        tape, memory = LoggedTape(log, joined=self.options.joined), LoggedBytes(log, ENCODE)
        mode = MetaMode(memory, tape.operator, self.options.known)
        context = RecordingContext(rank, max(2, self.plan.world_size), tape)
        transport = RecordingTransport(rank, tape, joined=self.options.joined)
        with needing_values(self.pipe), ExitStack() as stack:
            if self.options.joined:
                stack.enter_context(fused_without_values())
            functions = mode.functions(joined=self.options.joined)
            for each in (on_the_cpu(self.pipe), torch.no_grad(), functions, mode):
                stack.enter_context(each)
            hooks = stack.enter_context(HookSet())
            self._repeat(hooks, log, tape, memory)
            attend = partial(log.attend, memory)
            runner = RecordingRunner(context, transport, self.options, self._encoded, attend)
            self._note_phases(hooks, memory, tape)
            decodings = note_decodings(hooks, self.networks if self.plan.world_size == 1 else {})
            found = self._recorded(runner, memory, tape, log)
            if self.plan.world_size == 1:
                self.options.learnt.decodings = decodings
            return found

    def _derived(self, rank: int) -> RecordedRank | None:
        """Return the rank as it follows from one that was recorded before; None without one. Raises PlanError."""
        found = None if self._logged is None else self._logged.find(self.plan, rank, self.options.steps)
        if self._logged is None or found is None:
            return None
        check_plan_for(found.model, self.plan, self.kwargs)
        return self._logged.derived(self.plan, found, self.options)

    def _recorded(self, runner: RecordingRunner, memory: LiveBytes, tape: TapeRecorder, log: CallLog) -> RecordedRank:
        model = runner.adopt(self.pipe)
        check_plan_for(model, self.plan, self.kwargs)  # weights are divided at the first call
        options = CallOptions(plan=self.plan, verify=False, vae=self.options.vae, quiet=True)
        try:
            self._learn(runner, options)
            runner.begin_recording(partial(memory.begin, ENCODE))
            runner.generate(self.kwargs, options)
            if runner.was_first:
                runner.generate(self.kwargs, options)
            found = RecordedRank(  # before weights are gathered to restore the networks
                rank=runner.context.rank,
                tape=tape.tape,
                peaks={phase: most + self._slots for phase, most in memory.peaks.items()},
                working={phase: most + self._slots for phase, most in memory.working.items()},
                weight_bytes={name: _weight_bytes(network, memory) for name, network in self.networks.items()},
                stale_bytes=runner.stale_bytes,
            )
            if self._logged is not None:
                self._logged.keep(self.plan, self.options.steps, log, found, model)
            return found
        finally:
            runner.restore()

    def _learn(self, runner: RecordingRunner, options: CallOptions) -> None:
        """Find what a first call shows that is not like any other; if only VAEs show it, without the rest of it."""
        known = self.options.learnt.decodings
        decodings = [] if known is None else [each for each in known if each is not None]
        if not self._is_like_others:
            runner.generate(self.kwargs, options)
        elif self.plan.world_size == self.plan.data or self.options.learnt.has_decoded:
            return
        elif known is None or len(decodings) < len(known):
            runner.generate(self.kwargs, options)
        else:
            runner.decode(decodings, options)
        runner.learn()

    def _find_before(self, rank: int) -> None:
        """Find what the recording of a rank needs: what the first rank encodes, and how features are divided."""
        first = rank - Mesh(rank, range(self.plan.world_size), **self.plan.degrees()).of_one_image().rank
        if self.plan.encoders == "one" and rank != first and not self._encoded.are_known:
            self._of_rank(first)  # a derived one encodes nothing
        if self.plan.tensor > 1:
            self.options.features.search(self.pipe, denoisers_of(self.pipe), self.kwargs, self.plan.tensor)

    def _repeat(self, hooks: HookSet, log: CallLog, tape: LoggedTape, memory: LoggedBytes) -> None:
        """Note encoders and equal blocks again, where all have their weights, and of blocks none keeps values."""
        plan = self.plan
        if self._logged is None or plan.weights != "whole" or plan.stage * plan.tensor > 1:
            return
        if plan.encoders != "one":
            RepeatedEncoders(log, tape, memory, self._logged.encoders).install(hooks, encoders_of(self.pipe))
        if plan.patch == 1 or not plan.strategy.policy.remembers:
            RepeatedBlocks(log, tape, memory, self._logged.block_forms).install(hooks, self.networks)

    @property
    def _slots(self) -> int:
        """Bytes of the buffers through which hosted blocks come."""
        if not self._is_hosted:
            return 0
        networks = denoisers_of(self.pipe).values()
        return sum(SLOTS * max(map(weight_bytes, blocks_of(each).values()), default=0) for each in networks)

    @property
    def _is_like_others(self) -> bool:
        """Whether the first call is like any other but for VAEs: denoisers learn nothing, no weights are divided."""
        plan, learnt = self.plan, self.options.learnt
        bands = [each for each in denoisers_of(self.pipe).values() if splits_into_bands(each)]
        if plan.weights != "whole" or plan.stage * plan.tensor > 1:
            return False
        if plan.patch > 1 and not all(each in learnt.sites for each in bands):
            return False
        if plan.cfg == 1 or learnt.calls_by_branch is False:
            return True
        return bool(learnt.forms) and makes_known_calls(plan)

    def _note_phases(self, hooks: HookSet, memory: LiveBytes, tape: TapeRecorder) -> None:
        def begin(note: Callable[[], None], *_: Any) -> None:
            memory.enter(DENOISE)
            memory.merge(DECODE, into=DENOISE)  # what followed the last call was a part of its step
            note()

        for conditioner, _ in conditioners_of(self.pipe):
            hooks.before(conditioner, partial(begin, tape.conditioner))
        for denoiser in denoisers_of(self.pipe).values():
            hooks.before(denoiser, partial(begin, tape.denoiser))
            hooks.after(denoiser, lambda *_: memory.enter(DECODE))


def _weight_bytes(network: nn.Module, memory: LiveBytes) -> int:
    """Return the bytes of the storages of weights that are not counted in `memory`, each once."""
    with torch._C.DisableTorchFunction():  # a mode would see each look at a storage
        storages = {id(storage): storage for storage in (x.untyped_storage() for x in weight_tensors(network))}
        return sum(each.nbytes() for key, each in storages.items() if not memory.counts(key))
