"""The attention kernel a user has set stays the local one while tokens are split."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry, attention_backend
from torch.nn import functional as F

from patchpar.errors import PlanError, UnsupportedModel
from patchpar.shard.transformer.attention_backend import BackendChoice, BackendKernel, needing_torch_attention
from patchpar.shard.transformer.token_ranges import spread
from tests.tensors import relative

from .past import Case, on_ranks, plain, replicas
from .ranks import LIMIT
from .test_stale import SAME

SAGE = AttentionBackendName.SAGE
FLUX = "FluxTransformer2DModel"


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Numbers of queries and keys of every call of a kernel that stands in for sage attention: tokens before heads."""
    seen = []

    def sage(query: Any, key: Any, value: Any, is_causal: bool = False, scale: float | None = None) -> Any:
        seen.append((query.shape[1], key.shape[1]))
        heads_first = (x.transpose(1, 2) for x in (query, key, value))
        return F.scaled_dot_product_attention(*heads_first, is_causal=is_causal, scale=scale).transpose(1, 2)

    monkeypatch.setitem(_AttentionBackendRegistry._backends, SAGE, sage)
    monkeypatch.setitem(
        _AttentionBackendRegistry._supported_arg_names, SAGE, {"query", "key", "value", "is_causal", "scale"}
    )
    monkeypatch.setattr("diffusers.models.attention_dispatch._check_attention_backend_requirements", lambda *_: None)
    return seen


def chosen(model: Any) -> set[Any]:
    processors = (getattr(module, "processor", None) for module in model.modules())
    return {each._attention_backend for each in processors if hasattr(each, "_attention_backend")}


class Set(Case):
    """A case whose layers have been told to call the kernel."""

    def build(self) -> Any:
        model: Any = super().build()
        for module in model.modules():
            if hasattr(getattr(module, "processor", None), "_attention_backend"):
                module.processor._attention_backend = SAGE
        return model


@pytest.mark.parametrize("strategy", ["exact", "displaced:warmup_steps=1"])
def test_the_kernel_is_called_on_everybodys_keys(calls: list[Any], strategy: str) -> None:
    case = Case(name=FLUX, strategy=strategy, evaluations=3)
    want = plain(case) if strategy == "exact" else replicas(case)
    assert not calls
    found = on_ranks(Set(name=FLUX, strategy=strategy, evaluations=3))
    for got in found:
        assert max(relative(x, y) for x, y in zip(got, want, strict=True)) <= (LIMIT if strategy == "exact" else SAME)
    text = case.call(0)["encoder_hidden_states"].shape[1]
    texts = spread(text, 0, len(case.token_parts)).sizes
    for part, of_text in zip(case.token_parts, texts, strict=True):
        assert (len(part) + of_text, case.tokens + text) in calls


def test_ways_that_merge_parts_take_torchs_kernel(calls: list[Any]) -> None:
    strategy = "exact:attention=ring"
    want = plain(Case(name=FLUX, strategy=strategy, evaluations=2))
    for got in on_ranks(Set(name=FLUX, strategy=strategy, evaluations=2)):
        assert max(relative(x, y) for x, y in zip(got, want, strict=True)) <= LIMIT
    assert not calls


def test_the_choice_is_left_as_it_was(calls: list[Any]) -> None:
    model = Set(name=FLUX, strategy="exact").build()
    with BackendChoice(model).set_aside() as kernel:
        assert kernel is not None
        assert kernel.name is SAGE
        assert chosen(model) == {AttentionBackendName.NATIVE}
    assert chosen(model) == {SAGE}
    untouched = Case(name=FLUX, strategy="exact").build()
    with attention_backend("sage"), BackendChoice(untouched).set_aside() as kernel:
        assert kernel is not None
        assert kernel.name is SAGE
    assert chosen(untouched) == {None}
    with BackendChoice(untouched).set_aside() as kernel:
        assert kernel is None


@pytest.mark.parametrize("name", ["native", "_native_math"])
def test_torchs_own_forms_need_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    active = _AttentionBackendRegistry._active_backend
    monkeypatch.setattr(_AttentionBackendRegistry, "_active_backend", active)  # diffusers sets it for all of us
    case = Case(name=FLUX, strategy="exact", evaluations=1)
    model: Any = case.build()
    model.set_attention_backend(name)
    assert BackendChoice(model).kernel is None


def test_layers_with_different_kernels_are_refused(calls: list[Any]) -> None:
    """All of them would be run by one, and by which depended on the order of a set."""
    model: Any = Set(name=FLUX, strategy="exact").build()
    model.transformer_blocks[0].attn.processor._attention_backend = AttentionBackendName.NATIVE
    words = r"layers of FluxTransformer2DModel have different backends \(native, sage\).*set_attention_backend.*cfg=2"
    with pytest.raises(UnsupportedModel, match=words), BackendChoice(model).set_aside():
        pass
    model.transformer_blocks[0].attn.processor._attention_backend = None  # not chosen
    kernel = BackendChoice(model).kernel
    assert kernel is not None
    assert kernel.name is SAGE


def test_an_option_that_a_kernel_lacks_is_its_own_error(calls: list[Any]) -> None:
    q = torch.ones(1, 2, 3, 4)
    assert (
        BackendKernel(SAGE)(q, q, q, attn_mask=None, dropout_p=0.0, is_causal=False, enable_gqa=False).shape == q.shape
    )
    with pytest.raises(TypeError, match="attn_mask"):
        BackendKernel(SAGE)(q, q, q, attn_mask=torch.ones(3, 3, dtype=torch.bool))


def test_a_model_that_will_have_no_other_kernel_is_refused(calls: list[Any]) -> None:
    model = Case(name=FLUX, strategy="exact").build()
    reported = r"FluxTransformer2DModel runs with sage attention only \(no sage\).*cfg=2"
    with pytest.raises(UnsupportedModel, match=reported), needing_torch_attention(model, BackendKernel(SAGE)):
        raise ValueError("no sage.")
    with pytest.raises(ValueError, match=r"^its own fault$"), needing_torch_attention(model, None):
        raise ValueError("its own fault")
    with pytest.raises(PlanError, match=r"^ours$"), needing_torch_attention(model, BackendKernel(SAGE)):
        raise PlanError("ours")
