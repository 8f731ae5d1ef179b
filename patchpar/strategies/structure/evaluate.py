"""One denoiser call as calls for patches: the units of this rank, each with the arguments of its patch and branch."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from patchpar.shard.batch import Batch
from patchpar.shard.verification import Call
from patchpar.strategies.structure.patch_check import PatchCall, PatchCheck
from patchpar.strategies.structure.patch_inputs import PatchInputs, PatchPosition
from patchpar.strategies.structure.work_schedule import Evaluation, Schedule, Unit, evaluations_of

PatchAt = Callable[[int], tuple[Tensor, PatchPosition]]
Around = Callable[[Evaluation], AbstractContextManager[object]]


def nothing_around(_: Evaluation) -> AbstractContextManager[object]:
    """Return an empty context, for calls of which nothing is recorded."""
    return nullcontext()


@dataclass(frozen=True, slots=True, kw_only=True)
class DenoiserCall:
    """A call of the denoiser for the whole image, in `branches` of guidance: its own forward and the arguments.

    `in_bands`: the forward as a team of ranks computes it, where there are teams. `check`: of foreign code, if there is
    any verification.
    """

    forward: Callable[..., Any]
    layout: PatchInputs
    branches: int
    in_bands: Callable[..., Any] | None = None
    check: PatchCheck | None = None

    def evaluated(
        self, schedule: Schedule, rank: int, patch_at: PatchAt, around: Around = nothing_around
    ) -> tuple[dict[Unit, Tensor], Any]:
        """Return predictions x_BChw of the units of `rank`, alone and then with its team; see `predictions`."""
        whole_units, split_units = schedule.whole_units[rank], schedule.split_units[rank]
        if not split_units:
            return self.predictions(whole_units, patch_at, around)
        found = self.predictions(whole_units, patch_at, around)[0] if whole_units else {}
        more, like = self.predictions(split_units, patch_at, forward=self.in_bands)
        return found | more, like

    def predictions(
        self,
        units: Sequence[Unit],
        patch_at: PatchAt,
        around: Around = nothing_around,
        forward: Callable[..., Any] | None = None,
    ) -> tuple[dict[Unit, Tensor], Any]:
        """Return the predictions x_BChw of `units`, and one output of the denoiser.

        `patch_at`: a patch's latent x_BChw with all branches, and its position. `around` is entered for every call of
        `forward`, the denoiser's own unless given. Without units the first one is computed, for the structure of the
        output.
        """
        found: dict[Unit, Tensor] = {}
        like: Any = None
        for evaluation in evaluations_of(tuple(units) or (Unit(0, 0),), self.branches):
            x_BChw, position = patch_at(evaluation.patch)
            whole = self.layout.for_patch(x_BChw, position)
            like = self._call(forward or self.forward, whole, evaluation, around)
            prediction = self.layout.map_of(like, position.size)
            parts = prediction.chunk(len(evaluation.branches))
            for branch, part in zip(evaluation.branches, parts, strict=True):
                found[Unit(evaluation.patch, branch)] = part
        return found, like

    def _call(self, forward: Callable[..., Any], whole: Call, evaluation: Evaluation, around: Around) -> Any:
        """Return the output for the branches of an evaluation, of the arguments of all branches."""
        own, branch = whole, None
        if len(evaluation.branches) < self.branches:
            (branch,) = evaluation.branches
            own = Batch(len(self.layout.x_BCHW)).part(whole, branch, self.branches)

        def split() -> Any:
            with around(evaluation):
                return forward(*own[0], **own[1])

        if self.check is None:
            return split()
        call = PatchCall(plain=self.forward, whole=whole, own=own, branch=branch, branches=self.branches)
        return self.check.run(split, call)
