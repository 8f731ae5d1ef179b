"""One pipeline under several plans against plain diffusers in one process, on the ranks of a pool."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import PIL.Image
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from benchmarks.coverage.trial import LIMIT, SEEN, distance
from patchpar.comm.collectives import AllGather
from patchpar.comm.pytree import with_own_lists
from patchpar.errors import PatchparError
from patchpar.pipeline.messages import CallOptions, RandomState
from patchpar.pipeline.runner import PipelineRunner
from patchpar.plan.mesh import Axis
from patchpar.plan.plan import Plan
from patchpar.strategies.data.split import IMAGE_ARGUMENTS
from tests.ranks import PoolRank

from .entry import Built, Entry

SEED = 7
RANKS = 3
PATIENCE = 120.0
"""Seconds for which other ranks wait until rank 0 has made the plain reference, on a busy machine too."""

Judgement = Literal["exact", "refused", "wrong", "failed", "plain fails"]
"""The last: diffusers' own pipeline cannot do this call in one process either."""

CONTROLLED = 2
"""The number of patches with a control: without exchange three are as wrong as two, and the run has 20 minutes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One plan of one pipeline. `error`: relative, of what the call returns; `control`: the same without exchange.

    `said`: the sentence of a refusal, or what went wrong.
    """

    plan: str
    status: Judgement
    error: float | None = None
    control: float | None = None
    message: str = ""


def examined(this: PoolRank, name: str, plans: Sequence[str], verifications: str) -> list[Outcome]:
    """What each plan gives, on this rank, without those that leave it idle; patch=2 also without exchange.

    Collective: every rank of the pool calls it.
    """
    this.transport.deadline = PATIENCE
    engine, subject = this.runner(), _Subject(name)
    trials = [_Trial(this, engine, subject, plan, Path(verifications)) for plan in plans]
    return [outcome for trial in trials if (outcome := trial.run()) is not None]


class _Subject:
    """One pipeline: copies of it, and what plain diffusers returns for one prompt and for several."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._made: Built | None = None
        self._wanted: dict[int, Any] = {}

    @cached_property
    def entry(self) -> Entry:
        """Found when it is asked for, since the zoo takes seconds to import and idle ranks need none of it."""
        from .zoo import ZOO

        return ZOO[self._name]

    def make(self, prompts: int) -> Built:
        """A pipeline that nothing has been done to, and the arguments of a call for so many prompts."""
        if self._made is None:
            self._made = self.entry.make()
        pipe, call = copy.deepcopy(self._made)
        return pipe, call | _several_prompts(self.entry, call) if prompts > 1 else call

    def wanted(self, prompts: int) -> Any:
        """What one process returns."""
        if prompts not in self._wanted:
            self._wanted[prompts] = _plain(*self.make(prompts))
        return self._wanted[prompts]


class _Trial:
    """One plan, on one rank. Each plan has a pipeline of its own, so that none sees what another has left."""

    def __init__(
        self,
        this: PoolRank,
        engine: PipelineRunner,
        subject: _Subject,
        plan: str,
        verifications: Path,
    ) -> None:
        self.this, self.engine, self.subject = this, engine, subject
        self.text, self.plan = plan, Plan.parse(plan)
        self.options = CallOptions(
            plan=self.plan, verify=verifications / str(this.rank), random=RandomState(seed=SEED), quiet=True
        )

    def run(self) -> Outcome | None:
        text = self.text
        self.engine.restore()
        if self.this.rank >= self.plan.world_size:
            self.engine.generate(
                {}, self.options
            )  # without a pipeline: it takes part in nothing but the meeting of ranks
            return None
        want, failure_of_plain = self._wanted()
        if not self._on_all_ranks(not failure_of_plain):
            return Outcome(plan=text, status="plain fails", message=failure_of_plain)
        try:
            error, control = self._errors(want)
        except PatchparError as refusal:
            return Outcome(plan=text, status="refused", message=f"{type(refusal).__name__}: {refusal}")
        except Exception as failure:  # noqa: BLE001 - this is what the table is about
            return Outcome(plan=text, status="failed", message=f"{type(failure).__name__}: {failure}")
        return judged(text, error, control)

    def _wanted(self) -> tuple[list[Tensor], str]:
        """What this rank has to return, nothing where rank 0 returns it for all, and why plain diffusers cannot."""
        if self.this.rank and self.plan.data == 1:
            return [], ""
        try:
            return results(_of_rank(self.subject.wanted(self.plan.data), self.this.rank, self.plan.data)), ""
        except Exception as failure:  # noqa: BLE001 - an entry, or diffusers' own code, is wrong
            return [], f"{type(failure).__name__}: {failure}"

    def _on_all_ranks(self, is_so: bool) -> bool:
        """Whether it is so on every rank of the plan. Collective."""
        ranks = self.plan.world_size
        axis = Axis("patch", self.this.rank, ranks, tuple(range(ranks)))
        return all(map(bool, AllGather(self.this.comm(), axis, "plain", "plain").same(torch.tensor([is_so]))))

    def _errors(self, want: Sequence[Tensor]) -> tuple[float, float | None]:
        engine = self.engine
        pipe, call = self.subject.make(self.plan.data)
        engine.adopt(pipe)
        got = [engine.generate(_seeded(call), self.options)]
        if self.plan.patch == CONTROLLED:
            engine.control(exchange="off")
            got.append(engine.generate(_seeded(call), self.options))
        errors = [self._error(each, want) for each in got]
        return errors[0], next(iter(errors[1:]), None)

    def _error(self, generated: Any, want: Sequence[Tensor]) -> float:
        """Of what this rank has to return; 0 where it returns nothing, since another rank returns the same."""
        output = getattr(generated, "output", None)
        if output is None:
            return 0.0
        return distance(results(output), want)


def judged(plan: str, error: float, control: float | None) -> Outcome:
    """Exact if it is within the limit and its control is not."""
    if not error <= LIMIT:
        return Outcome(plan=plan, status="wrong", error=error, control=control, message=f"off by {error:.1e}")
    if control is not None and not control >= SEEN:
        message = f"right without exchange as well ({control:.1e})"
        return Outcome(plan=plan, status="wrong", error=error, control=control, message=message)
    return Outcome(plan=plan, status="exact", error=error, control=control)


def outcomes_of(of_ranks: Sequence[Sequence[Outcome]], plans: Sequence[str]) -> tuple[Outcome, ...]:
    """One outcome for each plan, of what `examined` returned on every rank."""
    found = [outcome for rank in of_ranks for outcome in rank]
    return tuple(merged([each for each in found if each.plan == plan]) for plan in plans)


def merged(of_ranks: Sequence[Outcome]) -> Outcome:
    """One outcome of those of all ranks: the worst verdict, the largest error, the smallest control that was seen."""
    order = ("plain fails", "failed", "wrong", "refused", "exact")
    worst = min(of_ranks, key=lambda each: (order.index(each.status), not each.message))
    if worst.status in ("refused", "failed", "plain fails"):
        return worst
    error = max(each.error or 0.0 for each in of_ranks)
    control = max((each.control for each in of_ranks if each.control is not None), default=None)
    return judged(worst.plan, error, control)


def results(output: Any) -> list[Tensor]:
    """Every array in what a pipeline returned, as tensors, in order."""
    leaves = tree_leaves(dict(output) if isinstance(output, Mapping) else output)
    found = [_tensor(leaf) for leaf in leaves]
    tensors = [each for each in found if each is not None]
    assert tensors, f"nothing to compare in a {type(output).__name__}"
    return tensors


def _of_rank(output: Any, rank: int, ranks: int) -> Any:
    """What one of `ranks` ranks of axis `data` has to return of an output for as many prompts."""
    if ranks == 1:
        return output
    return [value[rank : rank + 1] for value in dict(output).values() if value is not None and len(value) == ranks]


def _tensor(leaf: Any) -> Tensor | None:
    if isinstance(leaf, Tensor):
        return leaf.double()
    if isinstance(leaf, (np.ndarray, PIL.Image.Image)):
        return torch.as_tensor(np.asarray(leaf)).double()
    return None


def _plain(pipe: Any, call: Mapping[str, Any]) -> Any:
    torch.manual_seed(SEED)
    return pipe(**_seeded(call))


def _seeded(call: Mapping[str, Any]) -> dict[str, Any]:
    """The call with generators of its own, one for each prompt, and lists of its own, which some pipelines change.

    A generator of None is none at all: the pipeline draws no noise.
    """
    given = with_own_lists(dict(call))
    if given.get("generator", ...) is None:
        return {name: value for name, value in given.items() if name != "generator"}
    prompts = next((len(value) for value in call.values() if _is_prompts(value)), 0)
    own = [torch.Generator().manual_seed(SEED + number) for number in range(max(1, prompts))]
    return given | {"generator": own if prompts else own[0]}


def _is_prompts(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(isinstance(each, str) for each in value)


def _several_prompts(entry: Entry, call: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that make two prompts of one, with what else belongs to the first for both.

    Raises AssertionError for an entry without prompts.
    """
    assert entry.prompts, f"{entry.name} has no batch"
    twice = {name: [call[name]] * 2 for name in IMAGE_ARGUMENTS if _is_one(name, call.get(name))}
    for name in ("negative_prompt", "lyrics"):
        if isinstance(call.get(name), str):
            twice[name] = [call[name]] * 2
    return twice | {entry.prompts: [call[entry.prompts], entry.second]}


def _is_one(name: str, value: Any) -> bool:
    return isinstance(value, PIL.Image.Image) or (name == "video" and isinstance(value, list))
