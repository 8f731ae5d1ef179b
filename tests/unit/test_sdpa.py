"""One call of torch's attention as a value, and the mode in which something else answers it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from diffusers.hooks.layer_skip import AttentionScoreSkipFunctionMode
from torch import Tensor
from torch.nn import functional as F

from patchpar.shard.sdpa import AttentionCall, AttentionReplaced, SdpaMode


def tensors() -> tuple[Tensor, Tensor, Tensor]:
    query, key, value = torch.randn(3, 2, 4, 5, 8)
    return query, key, value


def test_it_holds_what_torch_takes() -> None:
    """In the same order and with the same defaults, so that a call can be taken as it was written."""
    arguments = torch.ops.aten.scaled_dot_product_attention.default._schema.arguments
    own = [name for name in AttentionCall._fields if name != "kernel"]
    assert own == [each.name for each in arguments]
    defaults = AttentionCall._field_defaults
    assert all(defaults[each.name] == each.default_value for each in arguments[3:])


@pytest.mark.parametrize(
    "call",
    [
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v),
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, None, 0.0, True),
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, torch.eye(5).bool()),
        lambda q, k, v: F.scaled_dot_product_attention(query=q, key=k, value=v, scale=0.1),
        lambda q, k, v: F.scaled_dot_product_attention(q, k[:, :2], v[:, :2], enable_gqa=True),
        lambda q, k, v: F.scaled_dot_product_attention(q[:, 0], k[:, 0], v[:, 0]),
    ],
)
def test_a_call_runs_as_it_was_written(call: Callable[..., Tensor]) -> None:
    given, seen = tensors(), []

    def answer(attention: AttentionCall) -> Tensor:
        seen.append(attention)
        return attention.run()

    with SdpaMode(answer):
        got = call(*given)
    assert torch.equal(got, call(*given))
    assert len(seen) == 1
    with SdpaMode(lambda attention: attention._replace(value=attention.value + 1).run()):
        assert not torch.equal(call(*given), got)


def test_a_head_is_added() -> None:
    query, key, value = (x[:, 0] for x in tensors())
    call = AttentionCall(query, key, value, torch.randn(2, 5, 5))
    assert torch.allclose(call.with_heads().run().squeeze(1), call.run(), atol=1e-6)


def test_the_kernel_gets_calls_with_heads() -> None:
    def kernel(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        return torch.zeros_like(query)

    query, key, value = tensors()
    assert not AttentionCall(query, key, value, kernel=kernel).run().any()
    assert AttentionCall(query[0], key[0], value[0], kernel=kernel).run().any()


def test_other_functions_are_left_or_answered() -> None:
    query, key, value = tensors()
    with SdpaMode(AttentionCall.run):
        assert torch.equal(torch.exp(query), query.exp())
    with SdpaMode(AttentionCall.run, lambda func, args, kwargs: func.__name__):
        answered, attended = torch.exp(query), F.scaled_dot_product_attention(query, key, value)
    assert answered == "exp"  # type: ignore[comparison-overlap]
    assert torch.equal(attended, F.scaled_dot_product_attention(query, key, value))


def test_modes_of_other_libraries_come_before_a_replacement() -> None:
    """As perturbed attention in guiders of diffusers: entered in a layer, whose attention is replaced around it."""
    query, key, value = tensors()
    asked: list[AttentionCall] = []

    def answer(call: AttentionCall) -> Tensor:
        asked.append(call)
        return call.query

    with AttentionReplaced(answer), torch.device("cpu"):
        with AttentionScoreSkipFunctionMode():
            assert F.scaled_dot_product_attention(query, key, key) is key
            assert not asked
            assert F.scaled_dot_product_attention(query, value[..., :2, :], value[..., :2, :]) is query
        assert F.scaled_dot_product_attention(query, key, key) is query
    assert len(asked) == 2


@pytest.mark.parametrize("mode", [SdpaMode, AttentionReplaced])
def test_autocast_gives_one_dtype_here_too(mode: Any) -> None:
    """As torch's function: norms of queries and keys leave them in fp32, beside values in bf16."""
    query, key, value = tensors()
    seen: list[AttentionCall] = []

    def answer(call: AttentionCall) -> Tensor:
        seen.append(call)
        return call.value

    with torch.autocast("cpu", torch.bfloat16):
        wanted = F.scaled_dot_product_attention(query, key, value.bfloat16(), torch.zeros(5, 5))
        with mode(answer):
            F.scaled_dot_product_attention(query, key, value.bfloat16(), torch.zeros(5, 5))
            F.scaled_dot_product_attention(query, key, value)
    found = seen[0].query, seen[0].key, seen[0].value, seen[0].attn_mask
    assert {x.dtype for x in found if x is not None} == {wanted.dtype} == {torch.bfloat16}
    assert seen[1].query is query, "what is of one dtype is left to torch"
    with mode(answer):
        F.scaled_dot_product_attention(query, key, value.bfloat16())
    assert seen[2].query is query, "without autocast torch refuses it"
