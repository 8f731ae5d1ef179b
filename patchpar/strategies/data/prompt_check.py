"""Foreign code in a denoiser whose prompts are on several ranks: what it computes must not depend on other prompts.

    one process     [a b c d]    rows of a denoiser call, one for each prompt
    this rank           [b]      compared with its row of [. b . .], in which the rows of other prompts are filled

No rank has the rows of the others, nor needs them: whatever they hold, ours must come out the same. Any other code
treats each row alone. So nothing is sent, and only code of other libraries or of the user is compared.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from patchpar.comm.pytree import floats_in
from patchpar.errors import UnsupportedModel
from patchpar.plan.mesh import Axis
from patchpar.shard.batch import Batch, count_branches, sample_of
from patchpar.shard.foreign.check import ForeignCheck
from patchpar.shard.foreign.cuts import Cut
from patchpar.shard.foreign.guarded_call import GuardedCall
from patchpar.shard.step_caches import cache_of, caches_set_aside
from patchpar.shard.transformer.probe.smaller_call import smaller_calls_of
from patchpar.shard.verification import Call, call_signature
from patchpar.shard.watched_network import WatchedNetwork
from patchpar.strategies.data.split import PromptSlice

FILLED = -1.5
"""Factor of what fills the rows of other prompts: our own rows, of another sign, and with other extremes."""
WITHOUT = "use data=1, and give the devices to another axis, e.g. patch"


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptRows:
    """Where the rows of our prompts are among those of all, in each of some guidance branches.

    `own`: our rows; `total`: those of all prompts; `positions`: of our rows, in order.
    """

    own: int
    total: int
    positions: tuple[int, ...]

    @classmethod
    def of(cls, prompts: PromptSlice, sample: Any) -> "PromptRows | None":
        """Return the rows of a denoiser call with our prompts; None where it has not as many rows for each."""
        ours, rows = prompts.stop - prompts.start, len(sample)
        if rows % ours:
            return None
        branches = count_branches(sample)
        branches = branches if rows % (branches * ours) == 0 else 1
        each = rows // (branches * ours)
        block = prompts.total * each
        positions = [
            branch * block + prompts.start * each + row for branch in range(branches) for row in range(ours * each)
        ]
        return cls(own=rows, total=branches * block, positions=tuple(positions))

    def sources(self) -> list[int]:
        """Return for each row of all prompts which of our rows stands there."""
        at = {position: row for row, position in enumerate(self.positions)}
        return [at.get(position, position % self.own) for position in range(self.total)]

    def factors(self) -> list[float]:
        """Return for each row of all prompts by what is multiplied what stands there: 1 for our own."""
        return [1.0 if position in self.positions else FILLED for position in range(self.total)]

    def ours_in(self, outputs: Sequence[Tensor], *, by_item: bool) -> list[Tensor]:
        """Return our rows of the tensors of an output, or with `by_item`, our items of one tensor for each row."""
        if by_item and len(outputs) == self.total:
            return [outputs[position] for position in self.positions]
        return [x[list(self.cut(len(x), len(x) * self.own // self.total) or ())] for x in outputs]

    def cut(self, size: int, own: int) -> Sequence[int] | None:
        """See `Cut`: some entries for each row."""
        each, rest = divmod(size, self.total)
        if rest or own != each * self.own:
            return None
        return [position * each + at for position in self.positions for at in range(each)]


class PromptCheck:
    """Comparison of the calls of one denoiser on the ranks of axis `data`, where it holds foreign code.

    `foreign`: decided by the ranks that compute the same prompts together. `unsure`: the denoiser may have been changed
    since the last call. `is_alone`: whether each rank runs the plain denoiser; other splits are compared with it by
    themselves.
    """

    def __init__(self, denoiser: nn.Module, data: Axis, foreign: ForeignCheck, *, is_alone: bool) -> None:
        self.denoiser, self.foreign, self.is_alone, self.unsure = denoiser, foreign, is_alone, True
        self._data, self._prompts = data, PromptSlice(0, 1, 1)
        self._watched = WatchedNetwork(denoiser)
        self._seen: list[Any] = []

    def begin(self, call: Mapping[str, Any]) -> None:
        """Begin an image, by a call of the pipeline for all prompts. Raises PlanError for too few of them."""
        self._prompts = PromptSlice.of(call, self._data.rank, self._data.size)

    def run(self, split: Callable[[], Any], plain: Callable[..., Any], call: Call) -> Any:
        """Return the output of `split`, compared with our rows of the `plain` call for all prompts where needed.

        Raises VerificationError, UnsupportedModel.
        """
        before = self._look()
        if self.foreign.is_needed:
            guarded = self._guarded(split, plain, call)
            output = self.foreign.run(guarded)
            self._seen.append(guarded.form)
        else:
            output = split()
        if before is not None:
            self._watched.record(before)
        return output

    def _look(self) -> Any:
        """Return the fingerprint of a denoiser that is not known yet, or has changed; else None."""
        before, self.unsure = self._watched.look(unsure=self.unsure), False
        if before is not None:
            self._seen.clear()
            self.foreign.look(before)
        return before

    def _guarded(self, split: Callable[[], Any], plain: Callable[..., Any], call: Call) -> GuardedCall:
        prompts, sample = self._prompts, sample_of(*call)
        rows, batch, form = PromptRows.of(prompts, sample), Batch.of(sample), (call_signature(call), prompts)
        if rows is None:
            raise UnsupportedModel(
                f"{self.foreign.blamed} may mix prompts, and {type(self.denoiser).__name__} is called with "
                f"{len(sample)} rows for {prompts.stop - prompts.start} prompts, so that it is not known which belong "
                f"to which: {WITHOUT}"
            )

        def for_all(call: Call) -> list[Tensor]:
            args, kwargs = batch.at_rows(call, rows.sources(), rows.factors())
            with caches_set_aside(self.denoiser):
                return rows.ours_in(floats_in(plain(*args, **kwargs)), by_item=batch.by_item)

        def smaller() -> Iterator[GuardedCall]:
            for each in smaller_calls_of(self.denoiser, call):
                own = partial(each.passed_to, plain)
                yield replace(guarded, plain=partial(for_all, (each.args, each.kwargs)), split=own, smaller=tuple)

        exactly: Callable[[], Any] | None = None if self.is_alone else partial(plain, *call[0], **call[1])
        if cache_of(self.denoiser) is not None and form in self._seen:
            exactly = self._nothing_to_compare
        cut: Cut = rows.cut
        guarded = GuardedCall(
            form=form,
            split=split,
            plain=partial(for_all, call),
            smaller=smaller if cache_of(self.denoiser) is None else tuple,
            cuts=lambda: [cut],
            exactly=exactly,
            what=f"{type(self.denoiser).__name__} with {prompts.stop - prompts.start} of {prompts.total} prompts",
            mixed="prompts",
            way_out=WITHOUT,
        )
        return guarded

    def _nothing_to_compare(self) -> Any:
        raise UnsupportedModel(
            f"{self.foreign.blamed} does what it did not in earlier steps, beside a cache of diffusers, so that it "
            f"cannot be compared with a plain call: use disable_cache(), or {WITHOUT}"
        )
