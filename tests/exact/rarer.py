"""Pipelines around rarer UNets as they are built, in bands against themselves alone: what they return, on a pool."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from patchpar.pipeline.messages import CallOptions, RandomState
from patchpar.plan.plan import Plan
from tests import tiny
from tests.exact.pipelines import SEED
from tests.ranks import PoolRank
from tests.tensors import relative

STEPS = 2


def errors(this: PoolRank, name: str, plans: Sequence[str], verifications: str) -> list[float] | None:
    """Relative errors of what comes out of each plan, then of the first without exchange. Rank 0 knows."""
    built = tiny.build(name)
    call = {"output_type": "latent", "num_inference_steps": STEPS} | built.call_kwargs
    plain = _output_of(built.pipe(**_seeded(call))) if this.rank == 0 else None
    engine = this.runner()
    engine.adopt(built.pipe)
    random = RandomState(seed=SEED)
    generated = []
    for plan in plans:
        options = CallOptions(plan=Plan.parse(plan), verify=Path(verifications), random=random, quiet=True)
        generated.append(engine.generate(_seeded(call), options))
        if plan == plans[0]:
            engine.control(exchange="off")
            alone = engine.generate(_seeded(call), options)
            engine.control(exchange="on")
    return None if plain is None else [relative(_output_of(each.output), plain) for each in (*generated, alone)]


def _seeded(call: dict[str, Any]) -> dict[str, Any]:
    torch.manual_seed(SEED)  # some pipelines do not hand their generator to the scheduler
    return call | {"generator": torch.Generator().manual_seed(SEED)}


def _output_of(output: Any) -> Tensor:
    return torch.as_tensor(output.images)
