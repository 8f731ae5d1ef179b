"""What a call takes beside the weights: keys and values by strategy against what is counted, the VAE in bands."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from patchpar.models.dry_run.call_memory import CallMemory
from patchpar.models.dry_run.dry_run import dry_run
from patchpar.models.dry_run.kept_tokens import AttentionSize, kept_bytes
from patchpar.models.dry_run.plan_memory import memory_of, network_bytes
from patchpar.plan.plan import Plan
from tests.dry_run.on_threads import memory_of_ranks
from tests.tiny import build

PAGE = Path(__file__).parents[2] / "docs/figures/gpu-counts.json"
MIB = 2**20
FLUX = {AttentionSize(1, 24, 4096 + 512, 128, 2): 57}
SDXL = {AttentionSize(2, 10, 64 * 64, 64, 2): 10, AttentionSize(2, 20, 32 * 32, 64, 2): 60}
OF_FLUX, OF_SDXL = 0.15, 0.2
"""How far it may be off. UNets keep halo rows and moments too."""


def held(model: str, strategy: str) -> int:
    """MiB that a rank of four holds after a stale step, as counted over the messages of NCCL."""
    tables = next(each["tables"] for each in json.loads(PAGE.read_text()) if each["heading"].startswith(model))
    row = next(row for row in tables[0] if row["strategy"] == f"`{strategy}`" and row["step"] == "stale")
    return int(row["held"].replace(",", ""))


@pytest.mark.parametrize(
    "strategy",
    [
        *("displaced", "pcpp", "fresh-edges", "fresh-edges:correction=none", "fresh-edges:correction=linear"),
        "fresh-edges:context=pooled",
    ],
)
def test_keys_and_values_are_those_that_are_counted(strategy: str) -> None:
    """With copies of what is sent, where that is not all tokens as they lie."""
    plan = Plan(patch=4, strategy=strategy)
    assert kept_bytes(plan, FLUX, 1.0, late=True) / MIB == pytest.approx(held("FLUX", strategy), rel=OF_FLUX)
    assert kept_bytes(plan, SDXL, 1.0, late=True) / MIB == pytest.approx(held("SDXL", strategy), rel=OF_SDXL)


def test_keys_and_values_by_axis() -> None:
    whole = sum(size.num_bytes * count for size, count in SDXL.items())
    assert kept_bytes(Plan(patch=4), SDXL, 1.0) == 0
    assert kept_bytes(Plan(stage=4), SDXL, 0.25) == 0
    displaced = Plan(patch=4, strategy="displaced")
    assert kept_bytes(displaced, SDXL, 1.0) == whole
    assert kept_bytes(Plan(cfg=2, patch=2, strategy="displaced"), SDXL, 1.0) == whole // 2
    piped = kept_bytes(Plan(stage=4, strategy="piped"), FLUX, 0.25)
    once = kept_bytes(Plan(stage=4, strategy="piped:correction=none"), FLUX, 0.25)
    of_stage = sum(size.num_bytes * count for size, count in FLUX.items()) // 4
    assert once == of_stage
    assert 2 * of_stage < piped < 2.5 * of_stage


def test_attention_to_other_tokens_is_not_kept() -> None:
    import torch

    from patchpar.shard.sdpa import AttentionCall

    query, text = torch.empty(2, 3, 10, 8), torch.empty(2, 3, 7, 8)
    assert AttentionSize.of(AttentionCall(query, text, text)) is None
    assert AttentionSize.of(AttentionCall(query, query, query)) == (2, 3, 10, 8, 4)
    assert AttentionSize.of(AttentionCall(query[0], query[0], query[0])) == (3, 1, 10, 8, 4)


def test_a_vae_decodes_in_bands() -> None:
    call = CallMemory(encode=10, denoise=50, decode=400)
    assert [call.on_rank(ranks) for ranks in (1, 2, 4, 16)] == [400, 230, 115, 50]
    assert call.divided(5) == CallMemory(encode=10, denoise=10, decode=400)


@pytest.mark.breadth
@pytest.mark.parametrize("plan", ["patch=2", "patch=2,strategy=fresh-edges", "stage=2,strategy=piped:pieces=2"])
def test_tensors_of_a_rank_are_at_most_those_of_the_formula(plan: str) -> None:
    """Of a whole image, whose decoding takes most of them. Small images have few tokens beside what is kept of each."""
    parsed, tiny = Plan.parse(plan), build("flux")
    tiny.pipe.set_progress_bar_config(disable=True)
    wanted = memory_of(parsed, network_bytes(tiny.pipe), dry_run(tiny.pipe, **tiny.call_kwargs).memory)
    beside = wanted.ranks[0] - memory_of(parsed, network_bytes(tiny.pipe)).ranks[0]
    for found in memory_of_ranks("flux", plan):
        assert found.peak <= 1.05 * beside <= 1.3 * found.peak
        assert found.kept <= wanted.kept <= 1.5 * found.kept
