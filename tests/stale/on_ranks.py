"""What the ranks of these tests run: a tiny denoiser under a strategy, evaluation by evaluation."""

from __future__ import annotations

from typing import Any

import torch

from patchpar.clock import StepClock
from patchpar.strategies import parse_strategy
from tests.exact import denoisers
from tests.ranks import Place


@torch.no_grad()
def sketch(place: Place, strategy: str, name: str = "sdxl", size=(32, 16), steps=4) -> Any:
    denoiser, clock, door = denoisers.build(name), StepClock(), place.door()
    plain = denoisers.build(name)
    patched = parse_strategy(strategy).install(denoiser, door, place.mesh(patch=place.world)["patch"], clock=clock)
    found = []
    for step in range(steps):
        call = denoisers.call(name, *size)
        call["sample"] = call["sample"] * (1 - 0.05 * step)
        clock.next_call()
        door.traffic.clear()
        got = patched.denoise(denoiser.forward, **call)[0]
        clock.tick()
        want = plain(**call)[0]
        found.append((f"{float((got - want).norm() / want.norm()):.1e}", dict(door.traffic.bytes_sent)))
    patched.finish()
    held = patched.history.memory.num_bytes() if patched.history else 0
    return [f[0] for f in found], found[-1][1], held
