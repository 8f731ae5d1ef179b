"""A denoiser whose blocks run on several ranks, one after the other: each stage runs a part of them.

    stage 0    blocks 0 to 9         returns placeholders for 10 to 19, whose results it does not need
    stage 1    placeholders for 0 to 8, what stage 0 sent for block 9, blocks 10 to 19

The network's own code runs on every stage, from its first line to its last. What the last stage returns is sent to all.
In the terms of GPipe (Huang et al. 2019, arXiv:1811.06965), with one micro-batch: what is divided is memory.
"""

import logging
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from patchpar.comm.collectives import AxisComm
from patchpar.comm.pytree import tensors_in
from patchpar.errors import PlanError, UnsupportedModel
from patchpar.shard.argument_changes import held_by, written
from patchpar.shard.foreign.refusals import refuse_untrusted
from patchpar.shard.stages.block_hooks import BlockHooks, GivenTo, OnCall, Recorder, given_to
from patchpar.shard.stages.block_outputs import Placeholders
from patchpar.shard.stages.block_seconds import seconds_of_blocks
from patchpar.shard.stages.layout import StageLayout
from patchpar.shard.stages.refusals import refuse_for_stages, refuse_kept_state
from patchpar.shard.stages.search import CutSearch, Plain
from patchpar.shard.stages.stage_pass import OtherShapes, StagePass
from patchpar.shard.stages.weights import Holders, HostedStageWeights, StageWeights, borrowed_blocks
from patchpar.shard.transformer.probe.capture import CallArguments
from patchpar.shard.verification import (
    Call,
    Comparison,
    Forward,
    call_signature,
    facts_of,
    is_alike,
    relative_error,
    verify_once,
)
from patchpar.shard.verification_cache import VerificationCache
from patchpar.shard.watched_network import WatchedNetwork
from patchpar.shard.weights.sharded import ShardedWeights

log = logging.getLogger(__name__)


class StagedDenoiser:
    """A denoiser whose blocks are divided between the ranks of `axis`; every rank passes and gets whole tensors.

    All ranks of the axis call each method together. At the first call of a form the network runs whole, cuts are found
    and, with `verifications`, compared with that run. From the second call each rank holds the weights of its own
    blocks only. `exchange`: "on", or "off" for the negative control, where stages receive zeros. `unsure`: the denoiser
    may have been changed since the last call.
    """

    history = None  # it keeps no stale values

    def __init__(self, denoiser: nn.Module, mesh: AxisComm, verifications: VerificationCache | None) -> None:
        self.denoiser, self.verifications = denoiser, verifications
        self.mesh, (self.comm, self.axis) = mesh, mesh
        self.exchange, self.unsure = "on", False
        self.error: float | None = None
        self._layouts: list[tuple[Any, list[StageLayout]]] = []  # with the signature of calls
        self._hooks: BlockHooks | None = None
        self.hosted: ShardedWeights | None = None
        """The weights, if blocks are in host memory; set it before the first call."""
        self.find_cuts: type[CutSearch] = CutSearch
        """How cuts are found; set it before the first call."""
        self.together = mesh
        """The ranks that have to find the same cuts, and call each method together; set it before the first call."""
        self.beside: Collection[object] = ()
        """Other parts of the pipeline; set it before the first call. Blocks that they run too are on every stage."""
        self._borrowed = frozenset[str]()
        self._weights: StageWeights | HostedStageWeights | None = None
        self._placeholders = Placeholders(self.comm.transport.device)
        self._watched = WatchedNetwork(denoiser)

    def denoise(self, forward: Forward, /, *args: Any, **kwargs: Any) -> Any:
        """Run one denoiser call; `forward` is the denoiser's own.

        Raises UnsupportedModel, VerificationError, PlanError, ExchangeError.
        """
        call = args, kwargs
        layouts = self._layouts_for(forward, call)
        with suppress(OtherShapes):
            return self._run(layouts, forward, call)
        layouts.append(self._prepare(forward, call, layouts))
        return self._run(layouts, forward, call)

    def layout_for(self, forward: Forward, call: Call) -> StageLayout:
        """Return how such calls are divided: found and verified at the first of them.

        After the first all weights are here, or come from host memory; from the second on those of own blocks are
        here. Raises as `denoise`.
        """
        return self._layouts_for(forward, call)[0]

    def _layouts_for(self, forward: Forward, call: Call) -> list[StageLayout]:
        if self.unsure and self._watched.has_changed:
            self.restore()
        self.unsure, signature = False, call_signature(call)
        found = next((each for each in self._layouts if each[0] == signature), None)
        if found is None:
            found = (signature, [self._prepare(forward, call)])
            self._layouts.append(found)
        else:
            self.release(found[1][0])
        return found[1]

    def gather(self) -> None:
        """Get all weights back until the next call. Collective. Raises PlanError, ExchangeError."""
        if self._weights is not None:
            self._weights.gather()

    @contextmanager
    def as_released(self, layout: StageLayout) -> Iterator[None]:
        """Context in which this stage has the weights of its own blocks only, and placeholders are NaN again."""
        assert self._weights is not None
        self._placeholders.refill()
        with self._weights.set_aside(self._holders(layout)):
            yield

    def new_pass(self, layouts: Sequence[StageLayout], name: str = "", given: GivenTo = given_to) -> StagePass:
        """Return what is called for the block calls of one pass, in errors called by `name`. See `StagePass`."""
        return StagePass(self.mesh, layouts, self._placeholders, name, alone=self.exchange == "off", given=given)

    def through(self, on_call: OnCall, forward: Forward) -> Forward:
        """Return `forward` with its block calls given to `on_call`, which checks their number if it is a StagePass."""
        hooks = self._hooks
        assert hooks is not None

        def run(*args: Any, **kwargs: Any) -> Any:
            found, count = hooks.pass_through(on_call, forward, args, kwargs)
            if isinstance(on_call, StagePass):
                on_call.check(count)
            return found

        return run

    def _run(self, layouts: Sequence[StageLayout], forward: Forward, call: Call) -> Any:
        stage, (args, kwargs) = self.new_pass(layouts), call
        return stage.finish(self.through(stage, forward)(*args, **kwargs))

    def release(self, layout: StageLayout) -> None:
        """Hold the weights of this stage's blocks only. Collective. Raises PlanError, ExchangeError."""
        assert self._weights is not None
        holders = self._holders(layout)
        if self._weights.holders != holders:
            self._weights.gather()
            self._weights.release(holders)

    def _holders(self, layout: StageLayout) -> Holders:
        return layout.holders() | dict.fromkeys(self._borrowed, frozenset(range(self.axis.size)))

    # --- the first call of a signature --------------------------------------------------------------------------

    def _prepare(self, forward: Forward, call: Call, known: Sequence[StageLayout] = ()) -> StageLayout:
        """Find how to divide such calls, at the cuts of those `known`, and verify it. All weights are here then."""
        refuse_for_stages(self.denoiser)
        refuse_untrusted(self.denoiser, self.verifications, f"stage={self.axis.size}", "use stage=1")
        before = self._watched.now()
        if self._weights is None:
            self._weights, self._hooks = self._divided(), BlockHooks(self.denoiser)
            self._borrowed = borrowed_blocks(self.denoiser, self.beside)
        try:
            self._weights.gather()
        except PlanError as error:
            raise PlanError(
                f"{error}; or use weights=hosted: the first call of a form runs the whole network"
            ) from error
        try:
            return self._found(forward, call, known)
        except BaseException:
            if not self._layouts:
                self.restore()
            raise
        finally:
            self._watched.record(before)

    def _divided(self) -> StageWeights | HostedStageWeights:
        if self.hosted is not None:
            return HostedStageWeights(self.hosted, self.axis)
        return StageWeights(self.denoiser, self.comm, self.axis)

    def _found(self, forward: Forward, call: Call, known: Sequence[StageLayout]) -> StageLayout:
        assert self._weights is not None
        own, recorder = self._copied(call), Recorder(self.denoiser)
        before = held_by(own), written(own)
        wanted = self._once(forward, own, recorder)
        refuse_kept_state(self.denoiser, wanted, before, own)
        plain = partial(self._plain, forward, call)
        search = self.find_cuts(self.denoiser, plain, recorder.calls, wanted)
        layout = self._alike(search, known) if known else self._searched(search, plain)
        self._check_same(layout)
        if self.verifications is not None:
            device, size = self.comm.transport.device, self.axis.size
            facts = facts_of(self.denoiser, device, call, stages=size, cuts=str(layout), given=str(layout.given))
            what = f"{type(self.denoiser).__name__} in {self.axis.size} stages ({layout})"
            way_out = ": use patch, with weights=sharded where memory is short"
            compare = partial(self._compared, layout, forward, call, wanted)
            self.error = verify_once(self.verifications, facts, self.mesh, compare, what, way_out)
        if self.axis.rank == 0:
            log.info("%s in stages: %s%s", type(self.denoiser).__name__, layout, _seconds(layout, search.seconds))
        return layout

    def _searched(self, search: CutSearch, plain: Plain) -> StageLayout:
        search.seconds = seconds_of_blocks(plain, self.together)
        return search.layout(self.axis.size)

    def _alike(self, search: CutSearch, known: Sequence[StageLayout]) -> StageLayout:
        """Return the division at the cuts of those known, so that each stage goes on with the weights it has."""
        is_alike = [call.path for call in search.calls] == known[0].paths
        layout = search.layout_at(known[0].cuts) if is_alike else None
        if layout is None or not all(map(layout.begins_as, known)):
            raise UnsupportedModel(
                f"{type(self.denoiser).__name__} runs other blocks, or reads more of them, where its arguments have "
                "the same shapes and other values, which stages would hold other weights for: use stage=1, and patch"
            )
        return layout

    def _plain(self, forward: Forward, call: Call, on_call: OnCall) -> Any:
        """Run a copy of the call through the blocks' hooks, for its own sake."""
        return self._once(forward, self._copied(call), on_call)

    def _once(self, forward: Forward, call: Call, on_call: OnCall) -> Any:
        """Run a call through the blocks' hooks."""
        assert self._hooks is not None
        with torch.no_grad():
            return self._hooks.pass_through(on_call, forward, *call)[0]

    def _copied(self, call: Call) -> Call:
        """Return the call with copies of its tensors."""
        own = CallArguments.of(self.denoiser, *call).cloned()
        return own.args, own.kwargs

    def _check_same(self, layout: StageLayout) -> None:
        text = f"{layout} {layout.carried} {[call.form for call in layout.calls]}"
        if not is_alike(self.together, "stages", text):  # all ranks see it
            raise UnsupportedModel(
                f"the ranks find different stages in {type(self.denoiser).__name__} (here {layout}): give all of them "
                "the same model, and devices of the same kind"
            )

    def _compared(self, layout: StageLayout, forward: Forward, call: Call, wanted: Any) -> Any:
        """Run in stages, with NaN in what this stage does not have, and compare with the whole run bit for bit."""
        with torch.no_grad(), self.as_released(layout):
            found = self._run([layout], forward, self._copied(call))
        pairs = zip(tensors_in(found), tensors_in(wanted), strict=True)
        yield [Comparison(max((_difference(x, y) for x, y in pairs), default=0.0), 0.0)]

    # --- begin and end ------------------------------------------------------------------------------------------

    def reset(self) -> None:
        """Begin an image. Placeholders of other sizes are freed."""
        self.unsure = True
        self._placeholders.refill()

    def finish(self) -> None:
        """End an image: there is nothing to wait for."""

    def forget(self) -> None:
        """Make all weights whole and discard what is known; modules may change until the next call."""
        self.restore()

    def restore(self) -> None:
        """Leave the denoiser as it was, bit for bit. Idempotent. Collective.

        Raises PlanError, with nothing changed, where whole weights do not fit a device. Raises ExchangeError.
        """
        self.gather()
        self._placeholders.refill()
        self._layouts.clear()
        if self._hooks is not None:
            self._hooks.close()
        self._weights = self._hooks = None


def _seconds(layout: StageLayout, seconds: Sequence[float]) -> str:
    """Return what the stages take by the measured seconds of blocks, for logs."""
    runs = [layout.own_calls(stage) for stage in range(len(layout.cuts) + 1)]
    own = ", ".join(f"{1e3 * sum(seconds[run.start : run.stop]):.3g}" for run in runs)
    return f" ({own} ms)" if seconds else ""


def _difference(got: Tensor, want: Tensor) -> float:
    """Return the relative error of a tensor of any shape, zero only where all bits are equal."""
    if torch.equal(got, want):
        return 0.0
    return max(relative_error(got, want), torch.finfo(torch.float32).tiny) if want.is_floating_point() else 1.0
