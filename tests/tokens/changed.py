"""What the ranks of these tests run: a pipeline that is changed between images, split, and the same in one piece."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any

from torch import Tensor

from patchpar.pipeline.messages import CallOptions
from patchpar.plan.plan import Plan
from tests import tiny
from tests.ranks import PoolRank

from .on_ranks import PipelineCase, arguments, latents_of


@dataclass(frozen=True, slots=True)
class Change:
    """A method of the pipeline, or of one of its networks, and what it is called with."""

    method: str
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)


def generated_between(
    this: PoolRank, case: PipelineCase, changes: Sequence[Change], pipe: Any = None
) -> list[tuple[Tensor, Tensor]]:
    """Latents of an image after each change, split and plain. `pipe`: one that has come from the test's process.

    Needs all ranks of the pool.
    """
    alone, found, engine = tiny.build(case.name), tiny.build(case.name), this.runner()
    plan, images = Plan.parse(case.plan), []
    verify: Path | bool = case.verifications / str(this.rank) if case.verifications else False
    engine.adopt(found.pipe if pipe is None else pipe)
    try:
        for change in changes:
            engine.apply(change.method, change.args, change.kwargs)
            attrgetter(change.method)(alone.pipe)(*change.args, **change.kwargs)
            options = CallOptions(plan=plan, verify=verify, quiet=True)
            output = getattr(engine.generate(arguments(case, found), options), "output", None)
            if output is not None:
                images.append((latents_of(output), latents_of(alone.pipe(**arguments(case, alone)))))
    finally:
        engine.restore()
    return images
