"""Steps of SD 1.5 in batches on two devices, published by diffusers for torch 2.1 nightly, beside forecasts.

Two things follow from these rows. Their eager steps of one image say what a launch costs on two hosts: 25 us beside
the RTX 4090, 46 beside the A100, as its process launched 946 kernels in a step. The assumed 30 are between those of two
other published calls that wait for launches: 29 (text encoders on an H100) and 32 (SD 1.5 on another A100). And
compiled steps of 4 and 16 images say which part of its best products an A100 reaches over a whole network.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.forecast.models import Model, sd15
from benchmarks.forecast.published_rows import FLASH_1
from benchmarks.forecast.recorded import RecordedModel
from patchpar.plan.plan import Plan
from patchpar.plan.replay.machine import Machine
from patchpar.plan.replay.price import ASSUMED, COMPILED

SOURCE = "https://huggingface.co/docs/diffusers/v0.25.0/optimization/torch2.0"


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedRates:
    """Steps per second of so many images at once, eager and compiled. `attention`: see `FLASH_1`."""

    device: str
    images: int
    eager: float
    compiled: float
    attention: float = 1.0


RATES = (
    PublishedRates(device="A100", images=1, eager=23.13, compiled=49.74, attention=FLASH_1),
    PublishedRates(device="A100", images=4, eager=13.12, compiled=17.27, attention=FLASH_1),
    PublishedRates(device="A100", images=16, eager=3.6, compiled=4.68, attention=FLASH_1),
    PublishedRates(device="RTX4090", images=1, eager=41.89, compiled=49.81),
    PublishedRates(device="RTX4090", images=4, eager=12.84, compiled=15.59),
    PublishedRates(device="RTX4090", images=16, eager=3.2, compiled=3.85),
)


def of_batch(images: int) -> Model:
    """Return SD 1.5 for so many images of a prompt."""

    def model() -> tuple[Any, dict[str, Any]]:
        pipe, call = sd15()
        return pipe, {**call, "num_images_per_prompt": images}

    return model


MODELS = {f"sd15-{images}": of_batch(images) for images in (1, 4, 16)}


def lines(models: Mapping[str, RecordedModel]) -> Iterator[str]:
    """Yield the table."""
    yield (
        f"SD 1.5, 512 x 512, both guidance branches, by [diffusers]({SOURCE}). Milliseconds of a step. Chosen by these "
        "rows was the part of its best products that the A100 reaches (its compiled steps of 4 and 16). Eager steps of "
        "one image wait for the process, which took 25 µs for a launch on one host and 46 on the other; the assumed 30 "
        "are the middle of four hosts, of which the text encoders on an H100 and SD 1.5 with SDPA above show 29 and 32."
    )
    yield ""
    yield "| device | images | eager | predicted | error | compiled | predicted | error |"
    yield "|---|---|---|---|---|---|---|---|"
    for row in RATES:
        cells = [row.device, str(row.images)]
        for costs, rate in ((ASSUMED, row.eager), (COMPILED, row.compiled)):
            given = replace(costs, channels_last=costs.fused, attention_part=row.attention)  # eager norms undo it
            found = models[f"sd15-{row.images}"].forecast(Plan(), Machine.parse(row.device), 1, given).step.seconds
            cells += [f"{1e3 / rate:.1f}", f"{1e3 * found:.1f}", f"{found * rate - 1:+.0%}"]
        yield f"| {' | '.join(cells)} |"
