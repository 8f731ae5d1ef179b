"""No function of torch is intercepted while a UNet in bands runs, once its exchange points are known."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from patchpar.comm.collectives import Communicator
from patchpar.plan.mesh import Axis
from patchpar.plan.step_clock import StepClock
from patchpar.shard.sdpa import SdpaMode
from patchpar.strategies import parse_strategy
from tests.exact import denoisers
from tests.tokens.test_interception import modes_at
from tests.unit.threads import on_threads


@pytest.mark.parametrize("intercepted", [False, True])
def test_no_mode_stands_over_the_forward_of_a_unet(intercepted: bool) -> None:
    models, arguments = [denoisers.build("sdxl") for _ in range(2)], denoisers.call("sdxl", 16, 16)

    def on_rank(transport: Any) -> set[int]:
        model, clock = models[transport.rank], StepClock()
        axis = Axis("patch", transport.rank, 2, (0, 1))
        split: Any = parse_strategy("exact").install(model, Communicator(transport), axis, clock=clock)
        with torch.no_grad():
            clock.next_call()
            split.denoise(model.forward, **arguments)  # which finds the exchange points, by modes
            clock.tick()
            found, forward = modes_at(model), model.forward

            def watched(*args: Any, **kwargs: Any) -> Any:
                with SdpaMode(lambda call: call.run()):
                    return forward(*args, **kwargs)

            clock.next_call()
            split.denoise(watched if intercepted else forward, **arguments)
        split.finish()
        split.restore()
        return set(found.values())

    assert on_threads(2, on_rank, deadline=100.0) == [{int(intercepted)}] * 2
