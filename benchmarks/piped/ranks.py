"""What each stage of `benchmarks.piped` runs: a loop with a small transformer whose blocks sleep for each token."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from diffusers import PixArtTransformer2DModel
from diffusers.models.attention import FeedForward

from patchpar.comm.banded_tensor import BandedTensor
from patchpar.comm.collectives import AllGather, Communicator
from patchpar.comm.transport import DelayedTransport, connect
from patchpar.launch.executor import RankContext
from patchpar.plan.mesh import Mesh
from patchpar.plan.step_clock import StepClock
from patchpar.strategies.piped import PipedStages

SIDE, BLOCKS = 16, 8
TOKENS = SIDE * SIDE


def sleeping(seconds: float) -> Any:
    """A transformer each of whose blocks sleeps so long for all tokens, and for a part of them as much less."""
    torch.manual_seed(0)
    model = PixArtTransformer2DModel(
        sample_size=SIDE,
        patch_size=1,
        num_layers=BLOCKS,
        num_attention_heads=2,
        attention_head_dim=8,
        cross_attention_dim=16,
        caption_channels=16,
        norm_num_groups=4,
        out_channels=4,
        use_additional_conditions=False,
    )

    def sleep(module: Any, args: tuple[Any, ...]) -> None:
        time.sleep(seconds * args[0].shape[1] / TOKENS)

    for module in model.modules():
        if isinstance(module, FeedForward):
            module.register_forward_pre_hook(sleep)
    return model.eval().requires_grad_(False)


class Stage:
    """The engine of one stage."""

    def __init__(self, context: RankContext) -> None:
        torch.set_num_threads(1)
        bare = connect(context)
        self._line, self._context = DelayedTransport(bare), context
        self._comm = Communicator(self._line, context.beat)
        self._axis = Mesh(context.rank, range(context.world_size), stage=context.world_size)["stage"]
        self._gather = AllGather(Communicator(bare, context.beat), self._axis, "barrier", "begin")

    def measure(self, pieces: int, latency: float, seconds: float, steps: int, waits: bool) -> float:
        """Seconds of a step in pieces, the mean over so many. `seconds`: of a block; `waits`: for each prediction."""
        model, clock = sleeping(seconds), StepClock()
        piped = PipedStages(pieces=pieces).install(model, self._comm, self._axis, clock=clock)
        piped.in_bands = not waits
        x = torch.randn(1, 4, SIDE, SIDE, generator=torch.Generator().manual_seed(0))
        given = {
            "encoder_hidden_states": torch.randn(1, 4, 16, generator=torch.Generator().manual_seed(1)),
            "timestep": torch.tensor([500.0]),
            "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
            "return_dict": False,
        }

        def step(call: Callable[..., Any]) -> None:
            nonlocal x
            clock.next_call()
            prediction = call(model.forward, x, **given)[0]
            x = x - 0.01 * prediction
            clock.tick()

        with torch.no_grad():
            self._line.latency = 0.0
            for number in range(steps + 3):
                if number == 3:  # after an exact step, and two in pieces
                    self._line.latency = latency
                    self._gather.same(torch.zeros(1))
                    start = time.perf_counter()
                step(piped.denoise)
            end = x.whole() if isinstance(x, BandedTensor) else x
        took = time.perf_counter() - start
        assert bool(end.isfinite().all())
        piped.finish()
        piped.restore()
        return took
