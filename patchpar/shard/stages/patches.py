"""A denoiser in stages, each of which is several ranks: every rank runs its stage's blocks on its patch of the image.

    rank 0    stage 0, patch 0    blocks 0 to 9      sends what block 9 returns for patch 0 to rank 2
    rank 1    stage 0, patch 1    blocks 0 to 9      to rank 3
    rank 2    stage 1, patch 0    blocks 10 to 19
    rank 3    stage 1, patch 1    blocks 10 to 19

Within a stage patches exchange what their strategy says, in the stage's own blocks only. So weights, and keys and
values that are remembered, are divided by the stages, and activations by the patches.
"""

from collections.abc import Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from patchpar.comm.collectives import AxisComm
from patchpar.comm.pytree import floats_in
from patchpar.errors import UnsupportedModel
from patchpar.shard.denoiser import SharedDenoiser
from patchpar.shard.stages.block_hooks import Recorder, Run, given_to
from patchpar.shard.stages.denoiser import StagedDenoiser
from patchpar.shard.stages.layout import Given, StageLayout
from patchpar.shard.stages.stage_pass import OtherShapes
from patchpar.shard.stale.state import StaleState
from patchpar.shard.transformer.probe.capture import CallArguments
from patchpar.shard.verification import (
    Call,
    Comparison,
    Forward,
    call_signature,
    facts_of,
    is_alike,
    relative_error,
    rounding_limit,
    verify_once,
)


class StagedPatches:
    """A denoiser whose image is divided by `patched`, and whose blocks by `stages`. Every rank passes whole tensors.

    `together`: the ranks of both, which call each method together. At the first call of a form each rank has all
    weights. `exchange`: of both, see there.
    """

    def __init__(self, patched: SharedDenoiser, stages: StagedDenoiser, together: AxisComm) -> None:
        self.patched, self.stages, self._together = patched, stages, together
        stages.together = together
        self._known: list[tuple[Any, list[StageLayout]]] = []  # by the signature of calls

    @property
    def denoiser(self) -> nn.Module:
        """The network."""
        return self.patched.denoiser

    @property
    def history(self) -> StaleState | None:
        """What patches remember of earlier steps; None with a strategy that is exact."""
        return self.patched.history

    @property
    def unsure(self) -> bool:
        """Whether the denoiser may have been changed since the last call."""
        return self.patched.unsure

    @unsure.setter
    def unsure(self, value: bool) -> None:
        self.patched.unsure = value

    @property
    def exchange(self) -> str:
        """What is exchanged between patches; with "off" stages receive zeros, too: a negative control."""
        return self.patched.exchange

    @exchange.setter
    def exchange(self, value: str) -> None:
        self.patched.exchange = self.stages.exchange = value

    def denoise(self, forward: Forward, /, *args: Any, **kwargs: Any) -> Any:
        """Run one denoiser call; `forward` is the denoiser's own. Returns its output for the whole image.

        Raises UnsupportedModel, VerificationError, PlanError, ExchangeError.
        """
        if self.patched.unsure and self.patched.watched.has_changed:
            self.restore()
        self.stages.unsure, signature = False, call_signature((args, kwargs))
        found = next((each for each in self._known if each[0] == signature), None)
        if found is None:
            found = (signature, [self._prepare(forward, (args, kwargs))])
            self._known.append(found)
        layouts = found[1]
        self.stages.release(layouts[0])
        with suppress(OtherShapes) if self.history is None else nullcontext():  # which has begun a step by then
            return self._in_stages(layouts, self.patched.denoise, forward, (args, kwargs))
        layouts.append(self._prepare(forward, (args, kwargs)))
        self.stages.release(layouts[0])
        return self._in_stages(layouts, self.patched.denoise, forward, (args, kwargs))

    def _given(self, run: Run) -> Given:
        """Return what a block is given for this patch, and the numbers of tokens of all, some of which may change."""
        return (*given_to(run), *self.patched.token_counts)

    def _in_stages(self, layouts: Sequence[StageLayout], run: Forward, forward: Forward, call: Call) -> Any:
        """Return the output of `run`, which calls a forward once, with the blocks of this stage only."""
        stage, (args, kwargs) = self.stages.new_pass(layouts, given=self._given), call
        once = _Once(self.stages.through(stage, forward), type(self.denoiser).__name__)
        return stage.finish(run(once, *args, **kwargs))

    # --- the first call of a signature --------------------------------------------------------------------------

    def _prepare(self, forward: Forward, call: Call) -> StageLayout:
        """Find how such calls are divided, and verify it. Afterwards all weights are here."""
        whole = self.stages.layout_for(forward, call)
        self.stages.gather()  # it may know such calls from a comparison
        self.patched.prepare(forward, *call[0], **call[1])
        recorder, own = Recorder(self.denoiser, self._given), CallArguments.of(self.denoiser, *call).cloned()
        with torch.no_grad():
            wanted = self.patched.exactly(self.stages.through(recorder, forward), *own.args, **own.kwargs)
        layout = replace(whole, calls=tuple(recorder.calls))
        forms = str([(each.path, each.form) for each in layout.calls])
        if whole.paths != layout.paths or not is_alike(self.stages.mesh, "patches in stages", forms):
            raise UnsupportedModel(
                f"the stages compute different patches of {type(self.denoiser).__name__}, or other blocks than of the "
                "whole image: give all ranks the same model, and devices of the same kind, or use stage=1"
            )
        self._verify(layout, forward, call, wanted)
        return layout

    def _verify(self, layout: StageLayout, forward: Forward, call: Call, wanted: Any) -> None:
        """Compare patches in stages with the same patches without. Raises VerificationError."""
        verifications = self.stages.verifications
        if verifications is None:
            return
        (comm, axis), patches = self.stages.mesh, self.patched.mesh[1].size
        strategy = self.patched.policy.name
        split: dict[str, Any] = {"stages": axis.size, "cuts": str(layout), "patches": patches, "strategy": strategy}
        split["tokens"] = str([each for given in layout.given for each in given if isinstance(each, int)])
        facts = facts_of(self.denoiser, comm.transport.device, call, **split)
        what = f"{type(self.denoiser).__name__} in {axis.size} stages of {patches} patches ({layout})"
        compare = partial(self._compared, layout, forward, call, wanted)
        verify_once(verifications, facts, self._together, compare, what, ": use stage=1")

    def _compared(self, layout: StageLayout, forward: Forward, call: Call, wanted: Any) -> Iterator[list[Comparison]]:
        """Run with NaN in what this stage does not have."""
        own = CallArguments.of(self.denoiser, *call).cloned()
        with torch.no_grad(), self.stages.as_released(layout):
            found = self._in_stages([layout], self.patched.exactly, forward, (own.args, own.kwargs))
        pairs = list(zip(floats_in(found), floats_in(wanted), strict=True))
        limit = rounding_limit(y for _, y in pairs)  # keys of others may be added as they arrive
        yield [Comparison(max(relative_error(x, y) for x, y in pairs), limit)]

    # --- begin and end ------------------------------------------------------------------------------------------

    def reset(self) -> None:
        """Begin an image: nothing of the last one is used. Raises ExchangeError."""
        self.patched.reset()
        self.stages.reset()

    def finish(self) -> None:
        """End an image: wait for pending exchanges. Raises ExchangeError."""
        self.patched.finish()

    def forget(self) -> None:
        """Make all weights whole and discard what is known; modules may change until the next call."""
        self.restore()
        self.patched.forget()

    def restore(self) -> None:
        """Leave the denoiser as it was, bit for bit. Idempotent. Collective.

        Raises PlanError, with nothing changed, where whole weights do not fit a device. Raises ExchangeError.
        """
        self.stages.restore()
        self._known.clear()
        self.patched.restore()


class _Once:
    """A forward that may be called once, since a part of the weights is not here; of a network of that class."""

    def __init__(self, forward: Forward, kind: str) -> None:
        self._forward, self._kind, self._is_called = forward, kind, False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._is_called:
            raise UnsupportedModel(
                f"{self._kind} calls a block otherwise than at the first call with the same arguments, and stages hold "
                "only a part of its weights now: use stage=1"
            )
        self._is_called = True
        return self._forward(*args, **kwargs)
