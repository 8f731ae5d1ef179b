"""Which kernel returns attention with its log-sum-exp, what each is given, and that masks keep their size."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode

from patchpar.shard.attention import lse_kernels
from patchpar.shard.attention.lse_kernels import (
    CUDNN,
    EFFICIENT,
    FLASH,
    ON_CPU,
    WRITTEN_OUT,
    Processor,
    attend_by,
    kernel_for,
)
from patchpar.shard.attention.partial import Partial, attend_locally, merge_partials
from tests.breadth import first_of
from tests.sequence.half_precision import WIDTHS, errors_of_attention
from tests.tensors import relative

TURING, ADA, HOPPER = ((7, 5), (8, 9), (9, 0))


@pytest.mark.parametrize(
    ("processor", "dtype", "widths", "masked", "want"),
    [
        (Processor("cpu"), torch.float64, (20, 20), True, ON_CPU),
        (Processor("cuda", ADA), torch.float16, (64, 64), False, FLASH),
        (Processor("cuda", ADA), torch.bfloat16, (256, 256), False, FLASH),
        (Processor("cuda", ADA), torch.bfloat16, (250, 250), False, FLASH),
        (Processor("cuda", ADA), torch.bfloat16, (264, 264), False, EFFICIENT),
        (Processor("cuda", ADA), torch.bfloat16, (64, 128), False, EFFICIENT),
        (Processor("cuda", ADA), torch.bfloat16, (64, 64), True, EFFICIENT),
        (Processor("cuda", ADA), torch.float32, (64, 64), False, EFFICIENT),
        (Processor("cuda", HOPPER, cudnn=True), torch.bfloat16, (128, 128), False, CUDNN),
        (Processor("cuda", HOPPER, cudnn=True), torch.bfloat16, (160, 160), False, FLASH),
        (Processor("cuda", HOPPER, cudnn=True), torch.bfloat16, (128, 128), True, EFFICIENT),
        (Processor("cuda", HOPPER), torch.bfloat16, (128, 128), False, FLASH),
        (Processor("cuda", TURING), torch.float16, (64, 64), False, EFFICIENT),
        (Processor("cuda", TURING), torch.bfloat16, (64, 64), False, None),
        (Processor("cuda"), torch.bfloat16, (64, 64), False, EFFICIENT),  # ROCm
        (Processor("cuda", HOPPER, cudnn=True), torch.float64, (64, 64), False, None),
        (Processor("xpu"), torch.float16, (64, 64), False, None),
        (Processor("mps"), torch.float32, (64, 64), False, None),
    ],
)
def test_the_kernel_of_a_call(
    processor: Processor, dtype: torch.dtype, widths: tuple[int, int], masked: bool, want: object
) -> None:
    assert kernel_for(processor, dtype, widths, keys=50, masked=masked) is want


class Watched(TorchDispatchMode):
    """Notes the calls of attention, and the largest tensor that anything makes, in bytes of its storage."""

    def __init__(self) -> None:
        super().__init__()
        self.attention: list[tuple[str, tuple[Any, ...]]] = []
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if "attention" in name:
            self.attention.append((name, args))
        for x in found if isinstance(found, (tuple, list)) else (found,):
            if isinstance(x, Tensor) and x.device.type == "cuda":
                self.largest = max(self.largest, x.untyped_storage().nbytes())
        return found


def on_fake_cuda(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(*shape, device="cuda:0", dtype=dtype)


@pytest.mark.parametrize("processor", [Processor("cuda", ADA), Processor("cuda", HOPPER, cudnn=True)], ids=str)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("width", [*WIDTHS, 20])
def test_half_precision_on_cuda(
    monkeypatch: pytest.MonkeyPatch, processor: Processor, masked: bool, dtype: torch.dtype, width: int
) -> None:
    """Every kernel gets heads of a multiple of 8, and returns the log-sum-exp of the queries alone."""
    monkeypatch.setattr(lse_kernels, "processor_of", lambda _: processor)
    with FakeTensorMode(), Watched() as watched:
        q, k = (on_fake_cuda(2, 3, tokens, width, dtype=dtype) for tokens in (37, 50))
        bias = on_fake_cuda(2, 1, 1, 50, dtype=dtype) if masked else None
        out, lse = attend_locally(q, k, k, bias=bias)
    assert (tuple(out.shape), out.dtype) == ((2, 3, 37, width), dtype)
    assert (tuple(lse.shape), lse.dtype) == ((2, 3, 37), torch.float32)
    ((_, args),) = watched.attention
    assert all(x.shape[-1] == math.ceil(width / 8) * 8 for x in args[:3])


def test_grouped_keys_are_not_repeated_for_flash(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lse_kernels, "processor_of", lambda _: Processor("cuda", ADA))
    with FakeTensorMode(), Watched() as watched:
        q, k = on_fake_cuda(1, 6, 8, 64), on_fake_cuda(1, 2, 8, 64)
        attend_locally(q, k, k)
        attend_locally(q, k, k, bias=on_fake_cuda(1, 1, 8, 8))
    assert [(name, args[1].shape[1]) for name, args in watched.attention] == [
        ("_scaled_dot_product_flash_attention", 2),
        ("_scaled_dot_product_efficient_attention", 6),
    ]


def test_a_single_key_is_not_for_cudnn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which refuses it; a rank may have one token of text."""
    monkeypatch.setattr(lse_kernels, "processor_of", lambda _: Processor("cuda", HOPPER, cudnn=True))
    with FakeTensorMode(), Watched() as watched:
        for keys in (1, 2):
            q, k = on_fake_cuda(1, 6, 8, 64), on_fake_cuda(1, 6, keys, 64)
            attend_locally(q, k, k)
    assert [name.removeprefix("_scaled_dot_product_") for name, _ in watched.attention] == [
        "flash_attention",
        "cudnn_attention",
    ]


HUNYUAN = 118_800  # tokens of 129 frames at 720p


@pytest.mark.parametrize(("ranks", "keys"), first_of([(8, 14_850), (4, 29_700), (2, 59_401)], (8, 14_850)))
@pytest.mark.parametrize("start", [0, 3])
def test_a_mask_keeps_its_size_on_cuda(ranks: int, keys: int, start: int) -> None:
    """A mask of padding for HunyuanVideo at 720p: nothing made here is larger than queries, keys or values."""
    queries = HUNYUAN // ranks + 256
    with FakeTensorMode():
        q, k = on_fake_cuda(1, 24, queries, 128), on_fake_cuda(1, 24, keys, 128)
        bias = on_fake_cuda(1, 1, 1, keys + start).narrow(-1, start, keys)
        with Watched() as watched:
            attend_locally(q, k, k, bias=bias)
    assert watched.largest <= 2 * 24 * 128 * max(queries, keys)


def test_rows_of_a_mask_are_aligned_on_cuda() -> None:
    with FakeTensorMode(), Watched() as watched:
        q, k = on_fake_cuda(2, 4, 16, 64), on_fake_cuda(2, 4, 21, 64)
        biases = [on_fake_cuda(2, 4, 16, 21), on_fake_cuda(16, 24).narrow(-1, 3, 21), on_fake_cuda(2, 1, 1, 1)]
        for bias in biases:
            attend_locally(q, k, k, bias=bias)
    assert len(watched.attention) == len(biases)
    for _, args in watched.attention:
        mask = args[3]
        assert mask.shape == (2, 4, 16, 21)
        assert mask.stride(-1) == 1
        assert all(step % 8 == 0 for step in (*mask.stride()[:-1], mask.storage_offset()))


def test_a_part_whose_keys_are_all_masked_in_a_wider_dtype() -> None:
    """The smallest number of float32 is -inf in float16: the part counts nothing, and its output is 0 and not NaN."""
    q = torch.randn(1, 2, 3, 8, generator=torch.Generator().manual_seed(0)).half()
    out, lse = attend_locally(q, q, q, bias=torch.full((1, 1, 1, 3), torch.finfo(torch.float32).min))
    assert not out.any()
    assert lse.isneginf().all()


def wanted_lse(q: Tensor, k: Tensor, bias: Tensor | None, scale: float | None) -> Tensor:
    logits = (q @ k.mT) * (q.shape[-1] ** -0.5 if scale is None else scale)
    return (logits if bias is None else logits + bias).logsumexp(-1)


@pytest.mark.parametrize(
    "kernel", [ON_CPU, WRITTEN_OUT, WRITTEN_OUT._replace(multiple=8)], ids=["CPU", "plain", "padded"]
)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("width", [5, 16, 20])
def test_every_form_is_attention(kernel: Any, masked: bool, scale: float | None, width: int) -> None:
    """Padded heads and repeated keys change nothing; what a kernel adds to the log-sum-exp is cut."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, heads, tokens, width) for heads, tokens in ((6, 9), (2, 13), (2, 13)))
    bias = torch.randn(2, 1, 1, 13) if masked else None
    out, lse = attend_by(kernel, q, k, v, bias, scale)
    want = scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=scale, enable_gqa=True)
    torch.testing.assert_close(out, want, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(lse, wanted_lse(q, k.repeat_interleave(3, 1), bias, scale), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_parts_of_keys_in_half_precision_are_hardly_farther_off_than_one_kernel_of_all(dtype: torch.dtype) -> None:
    """Though each part is rounded, and then their sum. By the kernel of the format itself they are: the control."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 4, 600, 16, generator=generator).to(dtype) for _ in range(3))
    truth = scaled_dot_product_attention(q.double(), k.double(), v.double())
    of_format = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    one, *merged = (
        scaled_dot_product_attention(q, k, v),
        merge_partials(attend_locally(q, *part) for part in zip(k.chunk(3, 2), v.chunk(3, 2), strict=True)).out_BNlD,
        merge_partials(Partial(*of_format(q, *part)) for part in zip(k.chunk(3, 2), v.chunk(3, 2), strict=True))[0],
    )
    ours, control = (relative(each.double(), truth) / relative(one.double(), truth) for each in merged)
    assert ours < 1.1 < 1.15 < control, (ours, control)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("width", WIDTHS)
def test_parts_of_keys_with_masks_in_half_precision(width: int, dtype: torch.dtype, masked: bool) -> None:
    whole, parts, blind = errors_of_attention(torch.device("cpu"), dtype, width, masked=masked)
    assert parts <= 1.1 * whole + 1e-6
    assert blind > 10 * parts, "control: without the mask, or without a part of the keys"
