"""Find where a network can be cut into stages, by running it whole on one rank.

    a cut      blocks before it return NaN, but for some whose outputs are carried over: recorded ones of a whole run
    right      the output is that of the whole run, bit for bit
    carried    the last block before the cut; if that is not enough, each block whose NaN alone changes the output
               (the skip connections of UNets, hints of control blocks)

Blocks before the first large list of blocks, such as refiners of text, run on every stage.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import nn

from patchpar.comm.pytree import map_tensors, tensors_in
from patchpar.errors import PlanError, UnsupportedModel
from patchpar.shard.stages.balance import balanced_by_time
from patchpar.shard.stages.block_hooks import Run
from patchpar.shard.stages.block_outputs import OutputStructure, Placeholders
from patchpar.shard.stages.layout import RecordedCall, StageLayout
from patchpar.shard.unsupported_model import attempted

SMALL = 0.25
"""A list of blocks with less than this part of the largest list's bytes, before it, runs on every stage."""
Plain = Callable[[Callable[[int, str, Run], Any]], Any]
"""Runs the network once through block calls that go to the argument; returns its output."""


class CutSearch:
    """The cuts of one network for one form of its calls. `plain`: its whole run; `calls`: those recorded there.

    `seconds`: of each of them, measured; set them before the layout, the same on all ranks.
    """

    seconds: Sequence[float] = ()

    def __init__(self, network: nn.Module, plain: Plain, calls: Sequence[RecordedCall], wanted: Any) -> None:
        self.network, self.calls, self.first = network, tuple(calls), first_of_large(network, calls)
        self._plain, self._wanted, output = plain, tensors_in(wanted), OutputStructure.of(wanted)
        assert output is not None, "refused before"
        self.output = output
        self._known: dict[int, tuple[int, ...] | None] = {}
        self._outputs: dict[int, Any] = {}  # on the host: all blocks' outputs may not fit a device

    def layout(self, stages: int) -> StageLayout:
        """Return the best division into so many stages. Raises PlanError for too many, UnsupportedModel."""
        kind, count = type(self.network).__name__, len(self.calls) - self.first
        if stages > count:
            raise PlanError(
                f"plan stage={stages}, but {kind} runs {count} blocks one after the other: use "
                + (f"stage={count} at most" if count > 1 else "stage=1")
            )
        costs = [call.cost for call in self.calls[self.first :]]
        costs = costs if any(costs) else [1.0] * count
        wrong: set[int] = set()
        while True:
            possible = [cut for cut in range(1, count) if cut not in wrong]
            found = balanced_by_time(costs, self.seconds[self.first :], possible, stages)
            if found is None:
                raise UnsupportedModel(
                    f"{kind} can be cut into {count - len(wrong)} stages at most: at {len(wrong)} of {count - 1} "
                    f"places its code reads more of earlier blocks than they return. Use stage={count - len(wrong)}, "
                    "or patch and weights=sharded"
                )
            cuts = tuple(self.first + cut for cut in found)
            layout = self.layout_at(cuts)
            if layout is not None:
                return layout
            wrong |= {cut for cut in found if self.carried(self.first + cut) is None}

    def layout_at(self, cuts: tuple[int, ...]) -> StageLayout | None:
        """Return the division at these cuts; None where one of them is not right."""
        carried = [self.carried(cut) for cut in cuts]
        needed = tuple(each for each in carried if each is not None)
        return StageLayout(self.calls, self.first, cuts, needed, self.output) if len(needed) == len(cuts) else None

    def carried(self, cut: int) -> tuple[int, ...] | None:
        """Return the calls before a cut whose outputs are needed after it; None where these are not enough."""
        if cut not in self._known:
            self._known[cut] = self._carried(cut)
        return self._known[cut]

    def _carried(self, cut: int) -> tuple[int, ...] | None:
        if self._is_right(cut, {cut - 1}):
            return (cut - 1,)
        every = range(self.first, cut)
        if not self._is_right(cut, every):
            return None
        needed = self._needed(cut, list(every))
        return tuple(needed) if self._is_right(cut, needed) else None

    def _needed(self, cut: int, group: list[int]) -> list[int]:
        """Return those of the calls in `group` whose output changes that of the network."""
        others = [number for number in range(self.first, cut) if number not in group]
        if self._is_right(cut, others):
            return []
        if len(group) == 1:
            return group
        half = len(group) // 2
        return self._needed(cut, group[:half]) + self._needed(cut, group[half:])

    def _is_right(self, cut: int, carried: Collection[int]) -> bool:
        """Whether the output is that of the whole run if blocks before the cut return NaN, but for `carried`."""
        outputs = {number: self._output_of(number) for number in carried}
        device = self._wanted[0].device
        placeholders = Placeholders(device)

        def on_call(number: int, path: str, run: Run) -> Any:
            if not self.first <= number < cut:
                return run()
            if number in outputs:
                return map_tensors(lambda x: x.to(device, copy=True), outputs[number])  # the network may write to it
            return placeholders.output(self.calls[number].form)

        with attempted():
            found = tensors_in(self._plain(on_call))
            return len(found) == len(self._wanted) and all(map(torch.equal, found, self._wanted))
        return False

    def _output_of(self, number: int) -> Any:
        """Return the output of a block call in the whole run."""
        if number not in self._outputs:
            self._record_outputs()
        return self._outputs[number]

    def _record_outputs(self) -> None:
        def on_call(number: int, path: str, run: Run) -> Any:
            form, output = self.calls[number].form, run()
            self._outputs[number] = form.received([x.cpu() for x in form.sent(output)])
            return output

        self._plain(on_call)


def first_of_large(network: nn.Module, calls: Sequence[RecordedCall]) -> int:
    """Return the number of the first call of a block in a large list; 0 without calls."""
    sizes: dict[str, int] = {}
    for path in {call.path for call in calls}:
        weights = sum(x.numel() * x.element_size() for x in network.get_submodule(path).parameters())
        sizes[list_of(path)] = sizes.get(list_of(path), 0) + weights
    large = SMALL * max(sizes.values(), default=0)
    return next((number for number, call in enumerate(calls) if sizes[list_of(call.path)] >= large), 0)


def list_of(path: str) -> str:
    """Return the path of the list that a block is in."""
    return path.rpartition(".")[0]
