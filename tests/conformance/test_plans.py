"""Whole pipelines keep NCCL's rules under every axis and every way to hold weights, and give the same latents.

What `test_strategies` and `test_transformers` do not run: guidance and prompts on several ranks, stages, pieces,
features, weights that are gathered, encoders on one rank, images larger than a model was made for.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from unittest import mock

import pytest
import torch
from torch import Tensor

from patchpar.comm.pytree import tensors_in
from patchpar.comm.transport import Transport
from patchpar.pipeline import runner
from patchpar.pipeline.messages import CallOptions, CallResult
from patchpar.pipeline.runner import PipelineRunner
from patchpar.plan.plan import Plan
from patchpar.strategies.data import noise
from tests import tiny
from tests.breadth import first_of
from tests.conformance.stand_in import StandIn
from tests.conformance.test_strategies import PATIENCE, ROUNDING
from tests.contexts import ThreadContext
from tests.tensors import relative
from tests.unit.threads import on_threads

STEPS = 3
PLANS = [
    ("sdxl", "cfg=2"),
    ("wan", "cfg=2"),  # a call for each branch of guidance
    ("sdxl", "cfg=2,patch=2"),
    ("sdxl", "data=2,patch=2"),
    ("sd", "patch=2,strategy=structure:native=64,switch=0.3"),
    ("flux", "stage=2"),
    ("flux", "stage=2,patch=2"),
    ("flux", "stage=3,strategy=piped"),
    ("flux", "tensor=2"),
    ("flux", "tensor=2,patch=2"),
    ("flux", "patch=3,weights=sharded"),
    ("flux", "patch=2,encoders=one"),
]
OFTEN = (("wan", "cfg=2"), ("flux", "stage=3,strategy=piped"), ("flux", "patch=3,weights=sharded"))
LARGE = {"height": 128, "width": 128}
"""Larger than what the plan with structure says the model was made for."""


class Ranks:
    """A pipeline for each rank of a plan, which are threads: random states are those of the process."""

    def __init__(self, name: str, plan: str) -> None:
        self.plan, built = Plan.parse(plan), tiny.build(name)
        self.world = self.plan.world_size
        self._pipes = [deepcopy(built.pipe) for _ in range(self.world)]
        large = LARGE if "structure" in plan else {}
        prompts = {"prompt": [f"a {number}" for number in range(self.plan.data)]} if self.plan.data > 1 else {}
        self._call = built.call_kwargs | {"num_inference_steps": STEPS, "output_type": "latent"} | large | prompts

    def latents(self, transport: Transport) -> list[Tensor]:
        """What two calls return on a rank; nothing where another rank has the same."""
        engine = PipelineRunner(ThreadContext(transport.rank, self.world))  # type: ignore[arg-type]
        engine._connection.transport = transport
        engine.adopt(self._pipes[transport.rank], self.plan)
        found = list[Tensor]()
        for _ in range(2):
            each = [torch.Generator().manual_seed(3 + number) for number in range(self.plan.data)]
            given = self._call | {"generator": each if len(each) > 1 else each[0]}
            result = engine.generate(given, CallOptions(plan=self.plan, verify=False, quiet=True))
            found += tensors_in(result.output) if isinstance(result, CallResult) else []
        engine.restore()
        return found


@contextmanager
def sampled_as_asked() -> Iterator[None]:
    """Context in which ranks replace no function of the process, which all threads have: each would end the other's.

    None has to be replaced where each prompt has a generator of its own.
    """
    names = ("noise_of_whole_batch", "no_tokens_sampled")
    of_rows, of_tokens = (mock.patch.object(noise, name, return_value=nullcontext()) for name in names)
    with of_rows, of_tokens:
        yield


@pytest.mark.parametrize(("name", "plan"), first_of(PLANS, *OFTEN))
def test_a_plan_keeps_the_rules(name: str, plan: str) -> None:
    """And gives what it does on ranks that share memory."""
    stand_in = StandIn(Plan.parse(plan).world_size)
    with mock.patch.object(runner, "silence_libraries"), sampled_as_asked():
        found = stand_in.run(Ranks(name, plan).latents)
        assert [each for each in found if isinstance(each, BaseException)] == []
        assert stand_in.faults == []
        assert sum(each.num_posted for each in stand_in.communicators) > 0
        wanted = on_threads(stand_in.world, Ranks(name, plan).latents, deadline=PATIENCE)
    assert len(found[0]) == 2
    for got, want in zip(found, wanted, strict=True):
        assert [relative(*pair) <= ROUNDING for pair in zip(got, want, strict=True)] == [True] * len(got)
