"""Prices on this CPU: rates of kernels, two calls that calibrate, and eight other calls that are predicted from them.

Seconds are those of the processor on one thread, so that other processes disturb them less.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from statistics import fmean

import torch

from patchpar.models.files import embedded_model
from patchpar.pipeline.planner.tune.kernel_rates import measured_device
from patchpar.pipeline.planner.tune.real_calls import RandomDenoiser
from patchpar.pipeline.planner.tune.timer import DeviceTimer
from patchpar.plan.replay.measured_device import MeasuredCall, fitted

SIZES = {"embedded": (64, 128, 192, 256, 384), "embedded-dit": (64, 128, 192, 256, 384)}
CALIBRATING = (("embedded", 128), ("embedded-dit", 384))


def lines() -> Iterator[str]:
    """Yield the table. Raises RuntimeError where two measurements of a call do not agree."""
    timer = DeviceTimer(torch.device("cpu"), time.thread_time, lambda: 0.0)
    start = time.thread_time()
    rates = measured_device(timer, torch.float32, "CPU", 0)
    taken = time.thread_time() - start
    calls: dict[tuple[str, int], MeasuredCall] = {}
    for name, sizes in SIZES.items():
        model = RandomDenoiser(embedded_model(name), timer.device, torch.float32)
        for size in sizes:
            call = model.call(size)
            seconds = timer.steady(call.run)
            if seconds is None:
                raise RuntimeError(f"{name} at {size}: two measurements differ by more than 5 %: something else runs")
            calls[name, size] = MeasuredCall(operators=call.operators, seconds=seconds)
    device = fitted(rates, [calls[each] for each in CALIBRATING])
    yield (
        f"One thread, seconds of the processor. Rates were measured in {taken:.1f} s. Calibrated by "
        f"{' and '.join(f'{name} at {size}' for name, size in CALIBRATING)}: scale {device.scale:.2f}, "
        f"{1e6 * device.overhead:.0f} µs per kernel. Both guidance branches in one call."
    )
    yield ""
    yield "| model | pixels | measured ms | predicted ms | error | by rates alone |"
    yield "|---|---|---|---|---|---|"
    errors = []
    for (name, size), call in calls.items():
        if (name, size) in CALIBRATING:
            continue
        predicted, alone = (sum(map(each, call.operators)) for each in (device.seconds, rates.seconds))
        errors.append(abs(predicted / call.seconds - 1))
        cells = [name, f"{size} x {size}", f"{1e3 * call.seconds:.1f}", f"{1e3 * predicted:.1f}"]
        yield f"| {' | '.join([*cells, f'{predicted / call.seconds - 1:+.0%}', f'{alone / call.seconds - 1:+.0%}'])} |"
    yield ""
    yield f"Mean error {fmean(errors):.0%}, worst {max(errors):.0%}."
