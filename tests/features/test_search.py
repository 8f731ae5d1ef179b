"""Which features of a block each rank can hold is found by perturbing them, and proved; what is wrong is refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import diffusers
import pytest
import torch
from torch import nn

from patchpar.errors import UnsupportedModel
from patchpar.shard.tensor.cut import CutBlock
from patchpar.shard.tensor.feature_plan import BlockCut, FeatureCut, FeaturePlan
from patchpar.shard.tensor.norms import normalized, sums_of
from patchpar.shard.tensor.proof import BlockProof
from patchpar.shard.tensor.search import find_cut
from patchpar.shard.transformer.probe.capture import CallArguments, CapturedBlock, CapturedRun, watch
from tests.breadth import first_of
from tests.features.networks import captured
from tests.tiny.transformers import TRANSFORMERS

WHOLE = {"SanaWMTransformer3DModel": "linear attention, with state of all heads"}
"""Classes none of whose blocks is divided, and why."""
DECLARED = ("FluxTransformer2DModel", "Flux2Transformer2DModel", "QwenImageTransformer2DModel")
DECLARED += ("QwenImage21Transformer2DModel",)
"""Classes of which diffusers says what tensor parallelism divides."""
declares = pytest.mark.skipif(
    find_spec("diffusers.hooks.tensor_parallel") is None,
    reason=f"diffusers {diffusers.__version__} has no tensor parallelism, newer ones do",
)


def paths(cuts: tuple[FeatureCut, ...]) -> set[str]:
    return {each.path for each in cuts}


def test_gates_and_their_values_are_held_by_one_rank() -> None:
    cut = find_cut(captured("gated"), 2)
    assert cut.columns == (FeatureCut("proj", (((0, 10), (20, 30)), ((10, 20), (30, 40)))),)
    assert cut.rows == (FeatureCut("out", (((0, 10),), ((10, 20),))),)
    assert not cut.counts


def test_within_autocast_a_row_returns_the_dtype_of_torchs_linear() -> None:
    block, x = captured("gated").module, torch.randn(3, 20)
    cut = find_cut(captured("gated"), 2)
    with torch.autocast("cpu", torch.bfloat16):
        wanted = block.out(x)
        parts = CutBlock(block, cut, 0, lambda path, own: own)
        found = block.out(x[:, :10])
        parts.restore(lambda each, own, dim: own)
    assert found.dtype == wanted.dtype == torch.bfloat16


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", ["fused", "fused, layer norm"])
def test_heads_are_held_whole_and_a_norm_over_all_of_them_is_added_up(name: str, size: int) -> None:
    cut = find_cut(captured(name), size)
    assert cut.columns[0].sizes() == ([12, 24] if size == 2 else [12, 12, 12]), "whole heads, 4 features each"
    assert paths(cut.rows) == {"out"}
    assert paths(cut.norms) == {"norm"}
    assert [(each.name, each.values) for each in cut.counts] == [("heads", (1, 2) if size == 2 else (1, 1, 1))]


@pytest.mark.parametrize("eps", [None, 1e-6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_norm_of_small_values_over_ranks_has_the_eps_of_torchs(dtype: torch.dtype, eps: float | None) -> None:
    norm = nn.RMSNorm(48, eps=eps).to(dtype)
    x = (1e-2 * torch.randn(7, 48, generator=torch.Generator().manual_seed(0))).to(dtype)
    sums = torch.stack([sums_of(norm, part) for part in x.chunk(3, -1)]).sum(0)
    assert (normalized(norm, x, sums, 48) - norm(x)).norm() <= 1e-2 * norm(x).norm()


HALF = torch.bfloat16
DTYPES = [(torch.float32, HALF), (HALF, torch.float32), (HALF, HALF), (torch.float32, torch.float32)]


@pytest.mark.parametrize(("of_weight", "of_input"), DTYPES)
@pytest.mark.parametrize("norm", [diffusers.models.normalization.RMSNorm, nn.RMSNorm, nn.LayerNorm])
def test_a_norm_over_ranks_returns_the_dtype_of_the_whole_one(
    norm: Any, of_weight: torch.dtype, of_input: torch.dtype
) -> None:
    """Weights may be kept in fp32 in a model of half precision: diffusers' norm then returns fp32, torch's do not."""
    module, x = norm(48, eps=1e-6).to(of_weight), torch.randn(7, 48).to(of_input)
    if norm is nn.LayerNorm and of_weight != torch.float32 == of_input:
        return  # torch has no such layer norm
    sums = torch.stack([sums_of(module, part) for part in x.chunk(3, -1)]).sum(0)
    found, wanted = normalized(module, x, sums, 48), module(x)
    assert found.dtype == wanted.dtype
    torch.testing.assert_close(found, wanted, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("mean", [0.0, 3e4])
def test_a_layer_norm_over_ranks_is_as_precise_as_torchs(mean: float) -> None:
    """Where the mean is large, squares of it are no longer known to the variance in fp32."""
    norm, x = nn.LayerNorm(48), mean + torch.randn(7, 48, generator=torch.Generator().manual_seed(0))
    sums = torch.stack([sums_of(norm, part) for part in x.chunk(3, -1)]).sum(0)
    wanted = nn.functional.layer_norm(x.double(), (48,), eps=norm.eps)
    norm.weight, norm.bias = None, None  # as a rank's part has its own
    error = (normalized(norm, x, sums, 48) - wanted).norm() / wanted.norm()
    torchs = (nn.functional.layer_norm(x, (48,), eps=norm.eps) - wanted).norm() / wanted.norm()
    assert error <= max(1e-6, 4 * torchs)


def test_features_of_several_runs_come_back_in_order() -> None:
    """As of queries, keys and values in one Linear: each rank has some of each."""
    cut, x = FeatureCut("qkv", (((0, 1), (4, 6)), ((1, 4), (6, 9)))), torch.arange(18.0).view(9, 2)
    parts = [cut.part(x, 0, rank) for rank in range(2)]
    assert [part[:, 0].tolist() for part in parts] == [[0, 8, 10], [2, 4, 6, 12, 14, 16]]
    assert torch.equal(cut.whole(parts, 0), x)


def test_equal_features_of_a_layer_norm_have_no_negative_variance() -> None:
    """It is a difference of large sums, which rounding may take below zero."""
    norm, x = nn.LayerNorm(45, eps=1e-12), torch.linspace(3e3, 3e5, 64)[:, None].expand(64, 45)
    sums = torch.stack([sums_of(norm, part) for part in x.chunk(3, -1)]).sum(0)
    variance = sums[:, 0] / 45 - (sums[:, 1] / 45).square()
    assert (variance < -norm.eps).any(), "control"
    norm.weight, norm.bias = None, None
    assert not normalized(norm, x, sums, 45).any()


def test_a_table_for_all_heads_is_divided_like_them() -> None:
    cut = find_cut(captured("scaled"), 2)
    assert cut.arguments == (FeatureCut("factor", (((0, 4),), ((4, 12),))),)


def test_low_rank_adapters_are_divided_with_the_linear_beside_them() -> None:
    cut = find_cut(captured("adapted"), 2)
    assert paths(cut.columns) == {"up", "up_b"}
    assert paths(cut.rows) == {"down", "down_a"}


@pytest.mark.parametrize("name", ["mixed", "quantised"])
def test_features_that_meet_are_not_divided(name: str) -> None:
    with pytest.raises(UnsupportedModel, match="no Linear has output features that can be divided"):
        find_cut(captured(name), 2)


def test_more_ranks_than_heads_divide_nothing() -> None:
    with pytest.raises(UnsupportedModel, match="no Linear has output features that can be divided"):
        find_cut(captured("fused"), 4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_dtypes(dtype: torch.dtype) -> None:
    assert find_cut(captured("fused", dtype), 2) == find_cut(captured("fused"), 2)


def of_another(cuts: Sequence[FeatureCut]) -> tuple[FeatureCut, ...]:
    """Each rank has the features of another one."""
    return tuple(FeatureCut(each.path, tuple(reversed(each.runs))) for each in cuts)


WRONG: dict[str, tuple[str, Callable[[BlockCut], BlockCut], str]] = {
    "rows of another rank": ("gated", lambda cut: replace(cut, rows=of_another(cut.rows)), "sum at out differs by"),
    "columns of another rank": ("gated", lambda cut: replace(cut, columns=of_another(cut.columns)), "out differs by"),
    "a norm that each rank computes alone": ("fused", lambda cut: replace(cut, norms=()), "expected input with shape"),
    "a number of heads as before": ("fused", lambda cut: replace(cut, counts=()), "unflatten: Provided sizes"),
    "the argument of all heads": ("scaled", lambda cut: replace(cut, arguments=()), "must match the size of tensor b"),
}
"""A block, what is wrong with its cut, and what is said of it, by the proof or by the block."""


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_cut_is_not_proved(case: str) -> None:
    name, change, says = WRONG[case]
    block = captured(name)
    proof, right = BlockProof(block, 2), find_cut(block, 2)
    proof.check(right)
    before = {key: x.clone() for key, x in block.module.state_dict().items()}
    with pytest.raises((UnsupportedModel, RuntimeError), match=says):
        proof.check(change(right))
    after = block.module.state_dict()
    assert all(torch.equal(x, after[key]) for key, x in before.items())
    proof.check(right)


def test_a_plan_is_the_same_after_json() -> None:
    block = find_cut(captured("fused"), 2)
    plan = FeaturePlan(denoiser="Any", size=2, blocks=(block,), refused=("others, 2 x Mixed: features meet",))
    assert FeaturePlan.from_json(plan.to_json()) == plan
    assert "columns    qkv" in str(plan)
    assert "(whole on every rank)" in str(plan)


def seen_in(name: str) -> CapturedRun:
    tiny = TRANSFORMERS[name]
    model = tiny.build()
    with torch.no_grad():
        return watch(model, model.forward, CallArguments.of(model, (), tiny.call(0)))


def test_most_classes_are_divided() -> None:
    """Which of them, is proved class by class below. Older versions of diffusers have fewer."""
    assert all(name in TRANSFORMERS or name not in dir(diffusers) for name in WHOLE)
    assert len(TRANSFORMERS.keys() - WHOLE.keys()) >= min(58, len(TRANSFORMERS) - 1)


@pytest.mark.parametrize("name", first_of(TRANSFORMERS, "FluxTransformer2DModel", "LTXVideoTransformer3DModel"))
def test_blocks_of_diffusers(name: str) -> None:
    """Each cut that is found has been proved on a call of its block."""
    found, reasons = [], []
    for block in seen_in(name).values():
        if sum(isinstance(part, nn.Linear) for part in block.module.modules()) > 1:
            try:
                found.append(find_cut(block, 2))
            except UnsupportedModel as error:
                reasons.append(str(error))
    assert bool(found) == (name not in WHOLE), reasons
    assert all(cut.fraction > 0.15 for cut in found)


def declared(model: Any, size: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """The features of each rank in columns and rows as diffusers declares them, by path and kind of block."""
    from diffusers.hooks.tensor_parallel import resolve_tp_shard_specs

    columns: dict[str, Any] = {}
    rows: dict[str, Any] = {}
    for name, spec in resolve_tp_shard_specs(model, type(model)._tp_plan, size).items():
        path, _, parameter = name.rpartition(".")
        if parameter == "weight":
            (columns, rows)[spec.dim or 0][path] = [features_of(spec.block_sizes, size, rank) for rank in range(size)]
    return columns, rows


def features_of(pieces: Sequence[int], size: int, rank: int) -> set[int]:
    starts = [sum(pieces[:number]) for number in range(len(pieces))]
    parts = zip(starts, (piece // size for piece in pieces), strict=True)
    return {
        number for start, fraction in parts for number in range(start + rank * fraction, start + (rank + 1) * fraction)
    }


def found_by_path(block: CapturedBlock, cuts: Sequence[FeatureCut]) -> dict[str, Any]:
    return {
        f"{path}.{cut.path}": [{number for start, end in runs for number in range(start, end)} for runs in cut.runs]
        for path in block.paths
        for cut in cuts
    }


def attention_features(model: Any, path: str) -> int | None:
    """How many of the first features are of attention, in a Linear of Flux2 that has others too; None elsewhere."""
    linear = model.get_submodule(path)
    pieces = getattr(linear, "_tp_packed_col_blocks", None) or getattr(linear, "_tp_packed_row_blocks", None)
    of_flux2 = type(model).__name__.startswith("Flux2") and pieces is not None
    return sum(pieces[:-2]) if of_flux2 and len(pieces) > 2 else pieces[0] if of_flux2 else None


@declares
@pytest.mark.breadth
@pytest.mark.parametrize("name", DECLARED)
def test_columns_and_rows_are_those_that_diffusers_declares(name: str) -> None:
    """Also which features each rank holds.

    In the fused projection of Flux2, of the feed-forward features each rank holds as many, but others: diffusers takes
    a run of all of them, the search a run of each piece that is as wide as the queries. Both are right, since such
    features meet only in the row.
    """
    model = TRANSFORMERS[name].build()
    size = next(count for count in (2, 3, 5) if model.config.num_attention_heads % count == 0)
    columns: dict[str, Any] = {}
    rows: dict[str, Any] = {}
    for block in seen_in(name).values():
        cut = find_cut(block, size)
        columns |= found_by_path(block, cut.columns)
        rows |= found_by_path(block, cut.rows)
    wanted = declared(model, size)
    for found, of_diffusers in zip((columns, rows), wanted, strict=True):
        assert found.keys() == of_diffusers.keys()
        for path, features in found.items():
            assert [*map(len, features)] == [*map(len, of_diffusers[path])]
            attention = attention_features(model, path)
            for own, theirs in zip(features, of_diffusers[path], strict=True):
                assert {each for each in own ^ theirs if attention is None or each < attention} == set()


@declares
@pytest.mark.breadth
def test_no_other_class_declares_columns_and_rows() -> None:
    declaring = {name for name in TRANSFORMERS if getattr(getattr(diffusers, name), "_tp_plan", None)}
    assert declaring == set(DECLARED)
