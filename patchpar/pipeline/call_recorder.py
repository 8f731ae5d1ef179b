"""The predictions of a call of the pipeline on one rank: answered from a record, and recorded.

caller                       rank
  | --- CallOptions.recorded -> |     the first denoiser calls get these, if their samples have the same checksums
  | <-- RecordedPrediction ---------- |     after each of the others, from one rank of each prompt group
  | <-- RecordingStopped ------ |     what comes now cannot be replayed

The pipeline's own loop runs either way, so that schedulers, generators and callbacks come to the state in which the
recorded calls left them. Predictions leave a GPU while it computes the next ones; the process does not wait for it.
"""

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from patchpar.comm.async_tensor import AsyncTensor
from patchpar.comm.pytree import tensors_in
from patchpar.errors import CallCancelled, ReplayMismatch, UnsupportedModel
from patchpar.launch.accelerators import is_accelerator
from patchpar.launch.executor import CallAborted, RankContext
from patchpar.models.info import denoisers_of
from patchpar.pipeline.denoiser_hook import DenoiserHook
from patchpar.pipeline.installed_plan import InstalledPlan
from patchpar.pipeline.messages import CallOptions, CallSeconds, RecordedPrediction, RecordingStopped
from patchpar.pipeline.output_form import form_of, tree_of
from patchpar.pipeline.tensor_bytes import bytes_of, checksum, in_order_of_memory, own_copy, tensor_of
from patchpar.plan.plan import Plan
from patchpar.shard.argument_changes import ArgumentChanges
from patchpar.shard.batch import sample_of
from patchpar.shard.compiled import is_compiled
from patchpar.shard.hooks import ForwardHook, HookSet
from patchpar.shard.host_memory import HostCopy
from patchpar.shard.step_caches import cache_of
from patchpar.strategies.piped import PipedStages
from patchpar.strategies.structure.options import StructureGuidance

HOOK = "patchpar_recorder"
MOST_BYTES = 2**30
"""Of one call and prompt group, in the caller's memory. What comes later is not recorded."""


def why_not_recorded(pipe: Any, plan: Plan) -> str:
    """Return why predictions do not tell how a call of the pipeline goes on; empty if they do."""
    if isinstance(plan.strategy, (StructureGuidance, PipedStages)):
        return f"ranks with strategy {plan.strategy.name} keep more from step to step than predictions"
    for name, denoiser in denoisers_of(pipe).items():
        cache = cache_of(denoiser)
        if cache is not None:
            return f"{name} has a cache ({cache}), which keeps more from step to step than predictions"
        if is_compiled(denoiser):
            return f"{name} is compiled as a whole"
    return ""


class CallRecorder:
    """The denoiser calls of one call of the pipeline. `send`: to the caller; None on ranks whose calls another records.

    `recorded`: calls of this rank's prompt group, from the first one on.
    """

    def __init__(
        self,
        recorded: Sequence[RecordedPrediction],
        send: Callable[[object], object] | None,
        *,
        group: int = 0,
    ) -> None:
        self._recorded = sorted((each for each in recorded if each.group == group), key=lambda each: each.number)
        self._send, self._group = send, group
        self._report: Callable[[object], object] | None = None
        self._waited: Callable[[], float] = float
        self._number, self._depth, self._bytes = 0, 0, 0
        self._pending: deque[_Prediction] = deque()
        self._changes = ArgumentChanges()

    def report_seconds(self, report: Callable[[object], object], waited: Callable[[], float]) -> None:
        """Report what each call takes. `waited`: seconds that this rank has waited for others so far."""
        self._report, self._waited = report, waited

    @property
    def is_replaying(self) -> bool:
        """Whether the next call of a denoiser is answered from the record."""
        return self._number < len(self._recorded)

    def hooks_on(self, pipe: Any) -> HookSet:
        """Return hooks on the denoisers of a pipeline, in front of all others."""
        hooks = HookSet()
        for denoiser in denoisers_of(pipe).values():
            hooks.install(denoiser, ForwardHook(self.run), HOOK)
        return hooks

    def pass_pause_point(self, pause_point: Callable[[], object]) -> None:
        """Pass a pause point. If the call ends there, all predictions so far are sent before."""
        self.send_finished()
        try:
            pause_point()
        except (CallAborted, CallCancelled):
            self.send_finished(wait=True)
            raise

    def run(self, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]) -> Any:
        """Return the output of a denoiser call. Raises ReplayMismatch if the record is of other calls."""
        if self._depth:  # by a denoiser, of itself or another one
            return forward(*args, **kwargs)
        number, self._number = self._number, self._number + 1
        if number < len(self._recorded):
            return self._replayed(self._recorded[number], module, args, kwargs)
        if self._send is None:
            return self._timed(forward, args, kwargs)
        sample = checksum(tensors_in(sample_of(args, kwargs)))
        self._changes.begin((args, kwargs))
        output = self._timed(forward, args, kwargs)
        if self._changes.matter(sample_of(args, kwargs), (args, kwargs)):
            self._stop(RecordingStopped(f"{type(module).__name__} changes its arguments", loses=True))
        else:
            self._record(number, sample, output)
        return output

    def _timed(self, forward: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]) -> Any:
        begin, waited = time.perf_counter(), self._waited()
        self._depth += 1
        try:
            output = forward(*args, **kwargs)
        finally:
            self._depth -= 1
        if self._report is not None:
            self._report(CallSeconds(time.perf_counter() - begin - (self._waited() - waited)))
        return output

    def _replayed(self, call: RecordedPrediction, module: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> Any:
        sample = tensors_in(sample_of(args, kwargs))
        found = int(checksum(sample))
        if found != call.checksum:
            raise ReplayMismatch(
                f"denoiser call {call.number} got a sample with checksum {found:x}, where {call.checksum:x} was "
                "recorded: the arguments, the model, or the results of its encoders are others than then"
            )
        for hook in vars(module)["_diffusers_hook"].hooks.values():
            if isinstance(hook, DenoiserHook):
                hook.pass_over(*args, **kwargs)
        return tree_of(call.form, [tensor_of(each, sample[0].device) for each in call.tensors])

    def _record(self, number: int, sample: Tensor, output: Any) -> None:
        try:
            form = form_of(output)
        except UnsupportedModel as error:
            self._stop(RecordingStopped(str(error)))
            return
        tensors = tensors_in(output)
        self._bytes += sum(x.numel() * x.element_size() for x in tensors)
        if self._bytes > MOST_BYTES:
            self._stop(RecordingStopped(f"its predictions take more than {MOST_BYTES} bytes"))
            return
        self._pending.append(_Prediction(number, form, HostCopy(sample), [own_copy(x) for x in tensors]))
        self.send_finished()

    def _stop(self, event: RecordingStopped) -> None:
        assert self._send is not None
        self.send_finished(wait=True)
        self._send(event)
        self._send = None

    def send_finished(self, *, wait: bool = False) -> None:
        """Send the predictions whose values have come to the host; with `wait` all that this rank will get."""
        while self._pending and self._send is not None and self._pending[0].is_ready(wait=wait):
            self._send(self._pending.popleft().call(self._group))


@dataclass(slots=True)
class _Prediction:
    """Of one call, on its way to the caller. `tensors` are of any shape, and not used by others."""

    number: int
    form: Any
    sample: HostCopy
    tensors: list[Tensor]
    copies: list[HostCopy] | None = None

    def is_ready(self, *, wait: bool) -> bool:
        """Whether it can be sent; with `wait` also if the device has still to compute it."""
        if any(isinstance(x, AsyncTensor) and x.pending for x in self.tensors):
            return False  # of another rank, whose message nobody has asked for yet
        if self.copies is None:
            self.copies = [HostCopy(in_order_of_memory(x)) for x in self.tensors]
        return wait or all(copy.is_done for copy in (self.sample, *self.copies))

    def call(self, group: int) -> RecordedPrediction:
        assert self.copies is not None
        return RecordedPrediction(
            number=self.number,
            group=group,
            checksum=int(self.sample.wait()),
            form=self.form,
            tensors=tuple(map(bytes_of, self.tensors, (copy.wait() for copy in self.copies))),
        )


def recorder_for(
    pipe: Any, options: CallOptions, installed: InstalledPlan, context: RankContext
) -> CallRecorder | None:
    """Return what records a call on this rank, and replays what has been recorded of it; None if it does neither.

    What has been recorded is not used where it does not tell how the call goes on.
    """
    if not options.records and not options.recorded:
        return None
    mesh, comm = installed.mesh, installed.comm
    sends = options.records and (mesh is None or mesh.of_one_image().rank == 0)
    reason = why_not_recorded(pipe, options.plan)
    if reason:
        if sends:
            context.emit(RecordingStopped(reason, loses=True))
        return None
    group = 0 if mesh is None else mesh["data"].rank
    recorder = CallRecorder(options.recorded, context.emit if sends else None, group=group)
    if comm is not None and not options.plan.ratio and not is_accelerator(context.device):
        recorder.report_seconds(context.emit, lambda: sum(comm.traffic.seconds_waited.values()))
    return recorder
