"""Which plan large models fit with, on cards of several sizes: predicted by the formula, nothing is loaded or run.

python -m benchmarks.weights.fits --write docs/figures/fits.md
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from benchmarks.page import publish
from benchmarks.weights.large_models import MODELS, LargeModel
from patchpar.errors import PlanError
from patchpar.launch.host_memory import FreeMemory
from patchpar.models.quiet_libraries import silence_libraries
from patchpar.pipeline.auto_weights import ModelForecast, choose_weights
from patchpar.plan.plan import Plan

GIB = 2**30
CARDS = (8, 16, 24, 32, 48, 80)  # GiB
COUNTS = (1, 2, 4, 8)
CONTEXT = 0.6  # GiB of a card that a process takes before any tensor
HOST = 128  # GiB


def main() -> None:
    """Compute and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, help="also write the tables to this file")
    silence_libraries()
    publish(page(), parser.parse_args().write)


def page() -> Iterator[str]:
    """Lines of the page."""
    yield "# Models and cards: which plan fits"
    yield ""
    yield (
        'Predicted, not measured: the weights of `plan="auto"` in bfloat16 by the formula of '
        "[what fits](../weights.md#what-fits), for networks of published sizes without weights, and activations of one "
        f"denoiser call on one device, counted on the meta device. A card has {CONTEXT} GiB less than its size; the "
        f"host has {HOST} GiB free. Plans fill at most 95 % of what is free with resident blocks. Of several cards "
        "each may have its part of the activations. Tight: activations may not fit beside the weights. What the VAE "
        "and kernels take is not in it. `python -m benchmarks.weights.fits`"
    )
    for model in MODELS:
        yield from section(model)


def section(model: LargeModel) -> Iterator[str]:
    """Lines of one model."""
    forecast = model.forecast()
    weights = sum(each.whole for each in forecast.networks.values()) / GIB
    denoiser = sum(each.whole for each in forecast.networks.values() if each.is_divided and not each.is_encoder)
    yield from ("", f"## {model.name}, {model.size}", "")
    yield (
        f"Weights {weights:.1f} GiB (denoiser {denoiser / GIB:.1f} GiB), activations "
        f"{forecast.activations / GIB:.1f} GiB."
    )
    yield ""
    yield f"| cards | {' | '.join(f'{card} GiB' for card in CARDS)} |"
    yield "|" + "---|" * (len(CARDS) + 1)
    for count in COUNTS:
        cells = (fitting(forecast, count, card) for card in CARDS)
        yield f"| {count} | {' | '.join(cells)} |"


def fitting(forecast: ModelForecast, count: int, card: float) -> str:
    """What a plan says of weights; "none" where no plan fits."""
    free = FreeMemory(device=int((card - CONTEXT) * GIB), host=HOST * GIB)
    try:
        choice = choose_weights(forecast, count, free)
    except PlanError:
        return "none"
    plan = choice.plan or Plan()
    resident = f", {plan.resident} resident" if plan.resident else ""
    return f"{plan.weights}{resident}{', tight' if choice.is_tight else ''}"


if __name__ == "__main__":
    main()
