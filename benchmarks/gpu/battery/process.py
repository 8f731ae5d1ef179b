"""Where the process of one rank spends a step, by function: what to make shorter where Python launches the kernels."""

from __future__ import annotations

import cProfile
import gc
import pstats
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple
from unittest import mock

import torch

from benchmarks.gpu.battery.timing import (
    RECOMMENDED,
    STALE_STEPS,
    Row,
    left_out,
    models,
    on_device,
    prepared_rank,
    turns_of,
    wait,
)
from patchpar.comm.transport.stream_waits import StreamWaits

MODEL = "sdxl"
MOST = 25  # functions of each strategy


class Own(NamedTuple):
    """What a function takes itself in a step, without those that it calls."""

    calls: float
    seconds: float


def process(device: str) -> Iterator[Row]:
    """Yield for each recommended strategy the functions that take the process most beyond the plain forward."""
    yield from left_out(device, [MODEL])
    for name, denoiser in models(device, [MODEL]):
        with on_device(device), torch.no_grad():
            plain = _profile(device, lambda: denoiser.network(**denoiser.call))  # noqa: B023  called before the next
            for strategy in RECOMMENDED:
                with prepared_rank(device, denoiser.network, strategy, denoiser.prepare, denoiser.call) as step:
                    for _ in range(STALE_STEPS):
                        step()
                    split = _profile(device, step)
                    whole = list(_whole_steps(device, step))
                for row in (*whole, *_rows(plain, split)):
                    yield {"model": name, "strategy": f"`{strategy}`", **row}


def _whole_steps(device: str, step: Callable[[], object]) -> Iterator[Row]:
    """Yield what a step takes without a profiler, in turns with what may disturb it left out: medians."""
    ways: dict[str, Callable[[], AbstractContextManager[Any]]] = {
        "whole step": nullcontext,
        "whole step, garbage collector off": _without_collector,
        "whole step, deadlines not watched": lambda: mock.patch.object(StreamWaits, "look", return_value=None),
    }
    found: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(turns_of(device)[1] * 2 + 1):
        for way, context in ways.items():
            with context():
                found[way].append(_seconds_of_one(device, step))
    yield from ({"function": way, "calls": 1, "ms": 1e3 * median(seconds)} for way, seconds in found.items())


@contextmanager
def _without_collector() -> Iterator[None]:
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _seconds_of_one(device: str, call: Callable[[], object]) -> float:
    """Return the seconds until the device has done all of a call."""
    wait(device)
    began = perf_counter()
    call()
    wait(device)
    return perf_counter() - began


def _rows(plain: dict[str, Own], split: dict[str, Own]) -> Iterator[Row]:
    nothing = Own(0.0, 0.0)

    def more(function: str) -> float:
        return split[function].seconds - plain.get(function, nothing).seconds

    for function in sorted(split, key=more, reverse=True)[:MOST]:
        own, before = split[function], plain.get(function, nothing)
        of_plain: Row = {"plain calls": round(before.calls), "plain ms": 1e3 * before.seconds}
        yield {"function": function, "calls": round(own.calls), "ms": 1e3 * own.seconds, **of_plain}


def _profile(device: str, call: Callable[[], object]) -> dict[str, Own]:
    """Return what each function takes in one call, on average of several."""
    warm_up, times = turns_of(device)
    for _ in range(warm_up):
        call()
    wait(device)
    profile = cProfile.Profile()
    for _ in range(times):
        profile.enable()
        call()
        profile.disable()
        wait(device)
    found: dict[str, Own] = {}
    entries: dict[tuple[str, int, str], Any] = pstats.Stats(profile).stats  # type: ignore[attr-defined]
    for where, (_, calls, seconds, _, _) in entries.items():
        before = found.get(_named(where), Own(0.0, 0.0))
        found[_named(where)] = Own(before.calls + calls / times, before.seconds + seconds / times)
    return found


def _named(where: tuple[str, int, str]) -> str:
    """Return the name of a function, with its file where it has one."""
    file, _, name = where
    return name if file == "~" else f"{Path(file).parent.name}/{Path(file).name}: {name}"
