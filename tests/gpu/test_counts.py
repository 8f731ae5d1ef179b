"""Launches, messages, synchronisations and memory of one rank on a GPU, counted without one, stay below ceilings.

The networks have the layers of SDXL and FLUX at 1024 x 1024, but few of them.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch.nn import functional as F

from benchmarks.gpu.denoisers import DENOISERS, Denoiser
from benchmarks.gpu.recorder import CallCounts
from benchmarks.gpu.strategies import CFG, FakeRank
from patchpar.shard.stale.cache import StaleCache
from patchpar.shard.transformer.local_tokens import RULES
from tests.breadth import first_of
from tests.gpu.short_models import LAYERS, PIXELS, WORLD

MIB = 2**20
PAGE = Path(__file__).parents[2] / "docs/figures/gpu-counts.json"


class Ceiling(NamedTuple):
    """The most that one call may do. `syncs`: waits of the process for the device. MiB are rounded up.

    `groups` of messages, that is of those that are no collectives; `copies` between device and host.
    """

    launches: int
    operations: int
    syncs: int
    events: int
    allocations: int
    mib_sent: int
    mib_peak: int
    mib_held: int
    groups: int = 0
    copies: int = 0

    @classmethod
    def of(cls, counts: CallCounts) -> Ceiling:
        return cls(
            launches=sum(counts.launches.values()),
            operations=sum(counts.operations.values()),
            syncs=sum(counts.syncs.values()),
            events=counts.events,
            allocations=counts.allocations,
            mib_sent=math.ceil(sum(counts.bytes_out.values()) / MIB),
            mib_peak=math.ceil(counts.peak / MIB),
            mib_held=math.ceil(counts.held / MIB),
            groups=counts.groups,
            copies=sum(counts.copies.values()),
        )


# Ceilings only go down: who needs fewer launches, messages or bytes enters the new counts, which a failure prints. One
# went up: owners of stale tokens extrapolate them by a launch of their own, so that fresh-edges holds half of them.
# Of FLUX another did: each rank computes a part of the text, not all of it, and gathers its keys and values.
CEILINGS: dict[tuple[str, str], dict[str, Ceiling]] = {
    ("sdxl", "exact"): {
        "exact": Ceiling(340, 28, 0, 56, 456, 68, 72, 0),
    },
    ("sdxl", "displaced"): {
        "exact": Ceiling(412, 28, 0, 56, 562, 68, 158, 88, copies=4),
        "stale": Ceiling(345, 8, 0, 16, 474, 68, 167, 95),
    },
    ("sdxl", "pcpp"): {
        "exact": Ceiling(420, 28, 0, 56, 566, 68, 111, 40, copies=4),
        "stale": Ceiling(357, 8, 0, 16, 474, 21, 145, 73),
    },
    ("sdxl", "fresh-edges"): {
        "exact": Ceiling(354, 28, 0, 56, 479, 68, 133, 61, copies=4),
        "stale": Ceiling(360, 32, 0, 56, 456, 68, 193, 121),
    },
    ("sdxl", "fresh-edges:correction=none"): {
        "exact": Ceiling(354, 28, 0, 56, 467, 68, 132, 61, copies=4),
        "stale": Ceiling(360, 28, 0, 56, 456, 68, 192, 121),
    },
    ("sdxl", "fresh-edges:context=pooled"): {
        "exact": Ceiling(370, 28, 0, 56, 490, 68, 98, 26, copies=8),
        "stale": Ceiling(360, 32, 0, 64, 452, 17, 114, 42),
    },
    ("sdxl", "fresh-edges:correction=linear"): {
        "exact": Ceiling(354, 28, 0, 56, 479, 68, 133, 61, copies=4),
        "stale": Ceiling(416, 32, 0, 56, 504, 72, 193, 121),
    },
    ("sdxl", CFG): {
        "exact": Ceiling(319, 2, 0, 2, 352, 1, 138, 1, groups=1),
    },
    ("flux", "exact"): {
        "exact": Ceiling(199, 3, 0, 6, 226, 82, 162, 0),
    },
    ("flux", "exact:ulysses=4"): {
        "exact": Ceiling(201, 5, 0, 10, 232, 41, 148, 0),
    },
    ("flux", "exact:attention=ring"): {
        "exact": Ceiling(207, 7, 0, 14, 258, 82, 162, 0),
    },
    ("flux", "displaced"): {
        "exact": Ceiling(201, 5, 0, 10, 228, 82, 242, 108, copies=2),
        "stale": Ceiling(199, 5, 0, 10, 224, 82, 256, 108),
    },
    ("flux", "pcpp"): {
        "exact": Ceiling(203, 3, 0, 6, 228, 73, 235, 51, copies=2),
        "stale": Ceiling(203, 3, 0, 6, 222, 16, 265, 81),
    },
    ("flux", "fresh-edges"): {
        "exact": Ceiling(207, 5, 0, 10, 239, 82, 237, 103, copies=2),
        "stale": Ceiling(213, 7, 0, 6, 228, 82, 346, 199),
    },
    ("flux", "fresh-edges:correction=none"): {
        "exact": Ceiling(207, 5, 0, 10, 233, 82, 236, 103, copies=2),
        "stale": Ceiling(213, 5, 0, 6, 228, 82, 346, 199),
    },
    ("flux", "fresh-edges:context=pooled"): {
        "exact": Ceiling(213, 3, 0, 6, 242, 73, 214, 31, copies=4),
        "stale": Ceiling(211, 5, 0, 10, 224, 12, 248, 65),
    },
    ("flux", "fresh-edges:correction=linear"): {
        "exact": Ceiling(207, 5, 0, 10, 239, 82, 237, 103, copies=2),
        "stale": Ceiling(241, 7, 0, 6, 252, 91, 362, 199),
    },
}
DAILY = {
    ("sdxl", "exact"),
    ("sdxl", "fresh-edges"),
    ("sdxl", CFG),
    ("flux", "exact"),
    ("flux", "fresh-edges"),
}
"""The others are further cases of the same promise."""


@pytest.mark.parametrize(
    ("model", "strategy"),
    [pytest.param(*case, marks=() if case in DAILY else pytest.mark.breadth) for case in CEILINGS],
)
def test_no_count_is_above_its_ceiling_and_bytes_are_those_of_the_communicator(
    rank: FakeRank, models: dict[str, Denoiser], model: str, strategy: str
) -> None:
    steps, ceilings = rank.steps(models[model], strategy), CEILINGS[model, strategy]
    assert steps.keys() == ceilings.keys()
    for step, counts in steps.items():
        found, most = Ceiling.of(counts), ceilings[step]
        above = [name for name, count in found._asdict().items() if count > getattr(most, name)]
        assert not above, f"{strategy}, {step}: {', '.join(above)} of {found} are above {most}"
        booked = sum(counts.booked.values())
        padding = sum(counts.bytes_out.values()) - booked  # of packed messages
        assert 0 <= padding <= booked / 100


@pytest.mark.parametrize("strategy", ["displaced", "fresh-edges"])
@pytest.mark.parametrize("section", json.loads(PAGE.read_text())[1:3], ids=lambda section: section["heading"][:4])
def test_no_step_of_a_stale_strategy_launches_more_than_1_3_times_the_plain_model(
    section: dict[str, Any], strategy: str
) -> None:
    """At full size, as counted for the page; exact steps too, which gather keys and attend to them as `exact` does."""
    rows = (row for row in section["tables"][0] if row["strategy"] == f"`{strategy}`")
    of_plain = {row["step"]: float(row["of plain"]) for row in rows}
    assert of_plain.keys() == {"exact", "stale"}
    assert max(of_plain.values()) <= 1.3


OF_A_STALE_LAYER = {
    "fresh-edges": 4,
    "fresh-edges:correction=none": 4,
    "fresh-edges:bits=8": 5,
    "fresh-edges:context=pooled": 4,
    "fresh-edges:correction=linear": 18,
    "fresh-edges:context=pooled,bits=8": 5,
}
"""Launches above those of a plain layer: also ceilings. Of averages and of differences the messages are one each.

Eight of a correction with matrices are those of one call that solves for them.
"""


@pytest.mark.parametrize(
    ("strategy", "more"),
    first_of(
        [(strategy, more) for strategy in OF_A_STALE_LAYER for more in LAYERS["flux"]],
        ("fresh-edges", "num_layers"),
        ("fresh-edges:context=pooled,bits=8", "num_single_layers"),
    ),
)
def test_a_layer_with_stale_keys_launches_few_more_than_the_plain_one(
    rank: FakeRank, models: dict[str, Denoiser], strategy: str, more: str
) -> None:
    """Whether they are extrapolated, corrected, averaged or quantised: of a transformer with one layer more."""
    layers = LAYERS["flux"] | {more: 2}
    added = [
        sum(rank.steps(model, strategy)["stale"].launches.values()) - sum(rank.plain(model).launches.values())
        for model in (models["flux"], DENOISERS["flux"](PIXELS, layers=layers))
    ]
    assert 0 < added[1] - added[0] <= OF_A_STALE_LAYER[strategy]


@pytest.mark.parametrize("is_wide", [False, True], ids=["as it is", "gathered before it"])
def test_of_the_last_layer_the_output_is_gathered_and_not_its_wider_input(
    rank: FakeRank, models: dict[str, Denoiser], monkeypatch: pytest.MonkeyPatch, *, is_wide: bool
) -> None:
    """FLUX's `proj_out` makes 64 numbers of the 3,072 of a token, of which each rank has an own part."""
    layer, tokens = models["flux"].network.proj_out, (PIXELS // 16) ** 2 // WORLD
    if is_wide:
        monkeypatch.delitem(RULES, F.linear)  # so that a linear layer takes all tokens
    sent = rank.steps(models["flux"], "exact")["exact"].booked["tokens"]
    width = layer.in_features if is_wide else layer.out_features
    assert sent == (WORLD - 1) * tokens * width * layer.weight.itemsize
    assert (layer.in_features, layer.out_features) == (3072, 64)


def test_a_value_that_is_read_counts_as_a_synchronisation(
    rank: FakeRank, models: dict[str, Denoiser], monkeypatch: pytest.MonkeyPatch
) -> None:
    end = StaleCache.end

    def reading(cache: StaleCache) -> None:
        cache.drift.sum().item()
        end(cache)

    monkeypatch.setattr(StaleCache, "end", reading)
    counts = rank.steps(models["flux"], "displaced")["stale"]
    assert list(counts.syncs.values()) == [1]
    assert next(iter(counts.syncs)).startswith("_local_scalar_dense at patchpar/")


def test_a_kernel_more_counts_as_a_launch_more(
    rank: FakeRank, models: dict[str, Denoiser], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = rank.plain(models["flux"])
    forward = torch.nn.SiLU.forward
    monkeypatch.setattr(torch.nn.SiLU, "forward", lambda module, x: forward(module, x).mul_(1))
    after = rank.plain(models["flux"])
    more = sum(after.launches.values()) - sum(before.launches.values())
    assert more == after.launches["mul_"] - before.launches["mul_"] > 0
    assert not after.operations
