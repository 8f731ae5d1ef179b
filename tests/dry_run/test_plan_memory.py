"""The memory of a plan by its formula, against weights that are really divided, and what is said where none fits."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.weights.model import save_model
from patchpar.errors import PlanError
from patchpar.launch.file_pages import FilePages
from patchpar.launch.host_memory import FreeMemory
from patchpar.models.dry_run.call_memory import NO_CALL, CallMemory
from patchpar.models.dry_run.empty_pipeline import empty_pipeline
from patchpar.models.dry_run.kept_tokens import Attentions, AttentionSize, kept_bytes
from patchpar.models.dry_run.memory_terms import WeightTerms
from patchpar.models.dry_run.plan_memory import NetworkBytes, memory_of, network_bytes, plans_by_cost
from patchpar.pipeline.held_weights import HeldWeights, refuse_without_memory
from patchpar.plan.plan import Plan
from tests.weights.loading import saved

GIB = 2**30
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def flux(tmp_path_factory: pytest.TempPathFactory) -> str:
    return saved("flux", tmp_path_factory.mktemp("flux") / "model")


def no_comm() -> Any:
    raise AssertionError("a rank asks no other one while it loads")


@pytest.mark.parametrize(("weights", "resident"), [("sharded", 0), ("sharded", 1), ("hosted", 0)])
def test_the_formula_is_what_a_rank_holds(
    flux: str, monkeypatch: pytest.MonkeyPatch, weights: str, resident: int
) -> None:
    """But for the alignment of each tensor to 64 bytes, and of each part. Of weights that are in no file."""
    plan = Plan(patch=2, weights=weights, resident=resident)
    networks = network_bytes(empty_pipeline(Path(flux), {}))
    monkeypatch.setattr(FilePages, "have", lambda *_: False)
    held = HeldWeights(0, CPU, no_comm)
    pipe = held.load(flux, {}, plan)
    found, whole = 0, {id(x): x for net in pipe.components.values() if hasattr(net, "parameters") for x in tensors(net)}
    for each in held._held.values():
        assert each is not None
        in_slots = {id(packed.tensor) for block in each.blocks for packed in block.tensors}
        whole = {key: x for key, x in whole.items() if key not in in_slots}
        found += sum(x.numel() for x in each._slots) + (each.store.num_bytes if weights == "sharded" else 0)
    found += sum(x.numel() * x.element_size() for x in whole.values())
    wanted = memory_of(plan, networks).ranks[0]
    number = sum(1 for net in pipe.components.values() if hasattr(net, "parameters") for _ in tensors(net))
    assert wanted <= found <= wanted + 2 * 64 * 2 * number


def test_weights_that_are_in_files_take_no_memory_of_a_rank(flux: str) -> None:
    """CPUs of one host have one copy of a file in memory, which the system can drop; the formula counts it."""
    held = HeldWeights(0, CPU, no_comm)
    held.load(flux, {}, Plan(patch=2, weights="sharded"))
    assert [weights.store.num_bytes for weights in held._held.values() if weights is not None] == [0] * 3


def test_the_terms_add_up_and_are_named() -> None:
    """Weights, resident blocks, slots, activations of each phase with the VAE in bands, and keys and values."""
    network = NetworkBytes(outside=2 * GIB, blocks=(GIB,) * 10, is_encoder=False, is_divided=True)
    attentions = {AttentionSize(1, 16, 2**14, 128, 2): 16}
    call = CallMemory(encode=GIB, denoise=2 * GIB, decode=8 * GIB, attentions=attentions)
    plan = Plan(patch=2, weights="sharded", resident=2, strategy="fresh-edges")
    found = memory_of(plan, {"transformer": network}, call, on_gpus=True)
    weights = WeightTerms(whole=2 * GIB, blocks=4 * GIB, resident=2 * GIB, slots=2 * GIB)
    assert found.terms.weights == weights
    assert found.ranks[0] == found.terms.total == weights.total + found.terms.decode + found.kept
    assert 2 * GIB < found.kept < 3 * GIB
    text = "2.0 GiB weights + 4.0 GiB its part of the blocks + 2.0 GiB resident blocks + 2.0 GiB slots + 4.6 GiB "
    assert str(found.terms).startswith(f"{text}activations (encoding 1.0 GiB, denoising 2.0 GiB, VAE 4.6 GiB) + 2.")
    assert str(found.terms).endswith(" keys and values")
    assert "not known" in str(memory_of(plan, {"transformer": network}).terms)


FLUX_1024 = {AttentionSize(1, 24, 512 + 64 * 64, 128, 2): 57}
SDXL_2048 = {AttentionSize(2, 10, 128 * 128, 64, 2): 10, AttentionSize(2, 20, 64 * 64, 64, 2): 60}


@pytest.mark.parametrize(("attentions", "most"), [(FLUX_1024, 2.5e9), (SDXL_2048, 3.5e9)], ids=["FLUX", "SDXL"])
def test_stale_keys_and_values_on_each_of_four_gpus(attentions: Attentions, most: float) -> None:
    """Of all tokens a rank keeps its own quarter of two steps, and messages of a few attentions.

    Between CPU ranks it keeps all tokens of two steps.
    """
    plan = Plan(patch=4, strategy="fresh-edges")
    whole = sum(each.num_bytes * number for each, number in attentions.items())
    late, early = (kept_bytes(plan, attentions, 1.0, late=late) for late in (True, False))
    assert whole / 2 < late < 0.65 * whole
    assert late < most
    assert 1.7 * whole < early < 2.2 * whole
    assert kept_bytes(Plan(patch=4), attentions, 1.0, late=True) == 0


def tensors(network: torch.nn.Module) -> list[torch.Tensor]:
    return [*network.parameters(), *network.buffers()]


def test_plans_from_the_fastest_to_the_smallest(flux: str) -> None:
    networks = network_bytes(empty_pipeline(Path(flux), {}))
    whole = memory_of(Plan(patch=2), networks).ranks[0]
    found = list(plans_by_cost(Plan(patch=2), networks, NO_CALL, FreeMemory(device=whole - 1000, host=2**40)))
    texts = [str(each.plan).removesuffix(",strategy=exact") for each in found]
    assert texts[:2] == ["patch=2", "patch=2,encoders=one"]
    assert [text for text in texts if "weights=sharded" in text][-1] == "patch=2,weights=sharded"
    assert texts[-1] == "patch=2,weights=hosted"
    assert found[0].fits(FreeMemory(device=whole, host=0))
    assert not found[0].fits(FreeMemory(device=whole - 1, host=0))
    assert found[1].ranks[0] == whole > found[1].ranks[1]
    assert found[-1].host > 0
    assert not found[-1].fits(FreeMemory(device=whole, host=0)), "no host memory"
    assert found[0].fits(FreeMemory(device=None, host=2 * whole))
    assert not found[0].fits(FreeMemory(device=None, host=2 * whole - 1)), "CPU ranks share the host's"
    one_device = [each.plan for each in plans_by_cost(Plan(), networks, NO_CALL, FreeMemory(device=whole, host=2**40))]
    assert [plan.weights for plan in one_device if not plan.resident] == ["whole", "hosted"]


def test_a_refusal_says_that_no_plan_fits(flux: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = memory_of(Plan(patch=2), network_bytes(empty_pipeline(Path(flux), {}))).ranks[0]
    monkeypatch.setattr("patchpar.pipeline.held_weights.free_bytes", lambda device: whole // 1000)
    with pytest.raises(PlanError, match="no plan for these devices has room for them: use more devices") as caught:
        refuse_without_memory(CPU, whole, flux, {}, Plan(patch=2))
    assert re.search(
        r"plan patch=2\S* takes \S+ [KM]iB on a device \(\S+ \S+ weights \+ \S+ \S+ activations", str(caught.value)
    )
    assert "beside the context of this process" in str(caught.value)


@pytest.mark.parametrize(("world", "weights"), [(2, "sharded"), (1, "hosted")])
def test_a_refusal_names_the_plan_that_fits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, world: int, weights: str
) -> None:
    save_model(tmp_path, heads=2, double=1, single=12, dtype=torch.float32)  # blocks of which two are a small part
    networks = network_bytes(empty_pipeline(tmp_path, {}))
    whole = memory_of(Plan(patch=world), networks).ranks[0]
    smallest = memory_of(Plan(patch=world, weights=weights), networks).ranks[0]
    assert smallest < whole
    monkeypatch.setattr("patchpar.pipeline.held_weights.free_bytes", lambda device: smallest)
    with pytest.raises(PlanError, match=rf"use plan='[^']*weights={weights}[^']*', which takes .*slots"):
        refuse_without_memory(CPU, whole, str(tmp_path), {}, Plan(patch=world))
