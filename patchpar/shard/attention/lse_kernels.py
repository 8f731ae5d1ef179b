"""Fused attention kernels that also return the log-sum-exp of the logits, and which of them a call takes.

    device    kernel               takes
    cpu       flash for CPUs       every dtype; masks; also of tensors without values, on "meta"
    meta      of a GPU             the same without values, recorded for GPUs: half precision is not computed in fp32
    cuda      cuDNN                fp16, bf16; no mask; heads up to 128 wide; not a single key; where torch takes it
              flash                fp16, bf16; no mask; heads up to 256 wide; from compute capability 8.0 on
              memory-efficient     fp32, fp16, bf16 (from 8.0 on); masks; also all that ROCm, "cuda" by name, takes
    others    none: written out, with all logits in fp32

On CUDA a head's width is a multiple of 8; other widths are padded with zeros, which change no logit.

Shape letters: B batch, N query heads, M key heads (N / M queries share one), l queries, k keys, D width of a key and of
its query, E of a value.
"""

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from patchpar.comm.kernels.fused_op import is_fused
from patchpar.launch.accelerators import CUDA, cuda_capability
from patchpar.shard.precision import wide

HEAD_MULTIPLE = 8  # elements: 16 bytes in half precision
BIAS_MULTIPLE = 8  # elements to which the memory-efficient kernel needs rows of its bias aligned
HALF = (torch.float16, torch.bfloat16)
AMPERE = (8, 0)
CUDNN_CAPABILITIES, CUDNN_VERSION = ((9, 0), (10, 0)), 91501  # where torch takes cuDNN's attention before flash's
CUDNN_WIDEST, FLASH_WIDEST = 128, 256
CUDNN_KEYS = 2  # at least: it refuses a single one, as of a part in attention in parts

Capability = tuple[int, int]


class LseKernel(NamedTuple):
    """A kernel: `run(q, k, v, bias, scale)` returns [B, N, l, E] and [B, N, l]. `reuses_keys`: M may be less than N."""

    name: str
    run: Callable[[Tensor, Tensor, Tensor, Tensor | None, float], tuple[Tensor, Tensor]]
    reuses_keys: bool = False
    multiple: int = 1


class Processor(NamedTuple):
    """What decides between the kernels of a type of device.

    `capability`: of CUDA; None where it is not known or another's. `cudnn`: whether torch takes its attention first.
    """

    type: str
    capability: Capability | None = None
    cudnn: bool = False


@cache
def processor_of(device: torch.device) -> Processor:
    """Return what is known of a device."""
    capability = cuda_capability(device)
    if capability is None:
        return Processor(device.type)
    new_enough = (torch.backends.cudnn.version() or 0) >= CUDNN_VERSION  # type: ignore[no-untyped-call]
    return Processor(device.type, capability, cudnn=new_enough and capability in CUDNN_CAPABILITIES)


def kernel_for(
    processor: Processor, dtype: torch.dtype, widths: tuple[int, int], *, keys: int, masked: bool
) -> LseKernel | None:
    """Return the kernel of a call with heads of these widths, of keys and of values; None for one to write out.

    `keys`: how many.
    """
    if processor.type in ("cpu", "meta"):
        return ON_CPU
    capability = processor.capability
    if processor.type != CUDA or dtype not in (torch.float32, *HALF):
        return None
    if dtype == torch.bfloat16 and capability is not None and capability < AMPERE:
        return None
    widest = -(-max(widths) // HEAD_MULTIPLE) * HEAD_MULTIPLE
    if masked or dtype not in HALF or widths[0] != widths[1] or capability is None or capability < AMPERE:
        return EFFICIENT
    if processor.cudnn and widest <= CUDNN_WIDEST and keys >= CUDNN_KEYS:
        return CUDNN
    return FLASH if widest <= FLASH_WIDEST else EFFICIENT


def attend_with_lse(
    q_BNlD: Tensor, k_BMkD: Tensor, v_BMkE: Tensor, bias: Tensor | None = None, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """Return attention [B, N, l, E] and the log-sum-exp of its logits [B, N, l], in fp32 or wider.

    `bias` is added to the logits and broadcasts to [B, N, l, k]; it is never stored at that size.
    """
    kernel = kernel_of(q_BNlD, v_BMkE, keys=k_BMkD.shape[2], masked=bias is not None)
    return attend_by(kernel, q_BNlD, k_BMkD, v_BMkE, bias, scale)


def kernel_of(q_BNlD: Tensor, v_BMkE: Tensor, *, keys: int, masked: bool) -> LseKernel:
    """Return the kernel for queries and values like these, and at least so many `keys`."""
    if q_BNlD.is_meta and is_fused(q_BNlD):
        return WITHOUT_VALUES
    widths, processor = (q_BNlD.shape[3], v_BMkE.shape[3]), processor_of(q_BNlD.device)
    return kernel_for(processor, q_BNlD.dtype, widths, keys=keys, masked=masked) or WRITTEN_OUT


def attend_by(
    kernel: LseKernel, q_BNlD: Tensor, k_BMkD: Tensor, v_BMkE: Tensor, bias: Tensor | None, scale: float | None
) -> tuple[Tensor, Tensor]:
    """Return what this kernel returns: `attend_with_lse` chooses it."""
    _, heads, queries, head = q_BNlD.shape
    width = v_BMkE.shape[3]
    scale = head**-0.5 if scale is None else scale  # of the head as it was before it is padded
    if not kernel.reuses_keys and k_BMkD.shape[1] != heads:
        k_BMkD, v_BMkE = expand_heads(k_BMkD, heads), expand_heads(v_BMkE, heads)
    if head % kernel.multiple or width % kernel.multiple:
        q_BNlD, k_BMkD, v_BMkE = (_padded(x, kernel.multiple) for x in (q_BNlD, k_BMkD, v_BMkE))
    if bias is not None:
        bias = bias.to(q_BNlD.dtype).expand(*bias.shape[:-1], k_BMkD.shape[2])
    out_BNlE, lse_BNl = kernel.run(q_BNlD, k_BMkD, v_BMkE, bias, scale)
    return (
        out_BNlE if out_BNlE.shape[3] == width else out_BNlE.narrow(3, 0, width),
        lse_BNl if lse_BNl.shape[2] == queries else lse_BNl.narrow(2, 0, queries),
    )


def expand_heads(x_BMkD: Tensor, heads: int) -> Tensor:
    """Return grouped keys or values [B, M, k, D] repeated to one for each query head, [B, heads, k, D]."""
    group = heads // x_BMkD.shape[1]
    return x_BMkD if group == 1 else x_BMkD.repeat_interleave(group, dim=1)


def _padded(x: Tensor, multiple: int) -> Tensor:
    """Return x with zeros up to a multiple in its last dim."""
    missing = -x.shape[-1] % multiple
    return F.pad(x, (0, missing)) if missing else x


def _whole_size(bias: Tensor, q_BNlD: Tensor, k_BNkD: Tensor) -> Tensor:
    """Return a view of the bias [B, N, l, k]."""
    return bias.expand(*q_BNlD.shape[:3], k_BNkD.shape[2])


def _on_cpu(q_BNlD: Tensor, k_BNkD: Tensor, v_BNkE: Tensor, bias: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    """Half precision in fp32, as fast on a CPU: parts that are merged would each be rounded by the kernel besides."""
    if q_BNlD.dtype == torch.float32 and bias is None:  # as `_flash_for_cpus`
        found = torch._scaled_dot_product_flash_attention_for_cpu(q_BNlD, k_BNkD, v_BNkE, scale=scale)
        return found[0], found[1]
    bias = None if bias is None else wide(bias)
    out_BNlE, lse_BNl = _flash_for_cpus(wide(q_BNlD), wide(k_BNkD), wide(v_BNkE), bias, scale)
    return out_BNlE.to(q_BNlD.dtype), lse_BNl


def _flash_for_cpus(
    q_BNlD: Tensor, k_BNkD: Tensor, v_BNkE: Tensor, bias: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    mask = None if bias is None else _whole_size(bias, q_BNlD, k_BNkD)
    found = torch._scaled_dot_product_flash_attention_for_cpu(q_BNlD, k_BNkD, v_BNkE, attn_mask=mask, scale=scale)
    return found[0], found[1]


def _cudnn(q_BNlD: Tensor, k_BMkD: Tensor, v_BMkE: Tensor, bias: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    found = torch._scaled_dot_product_cudnn_attention(q_BNlD, k_BMkD, v_BMkE, bias, True, scale=scale)
    return found[0], found[1].flatten(2)  # [B, N, l, 1]; of torch 2.6 [B, N, l]


def _flash(q_BNlD: Tensor, k_BMkD: Tensor, v_BMkE: Tensor, bias: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    assert bias is None, "flash attention takes no bias"
    found = torch._scaled_dot_product_flash_attention(q_BNlD, k_BMkD, v_BMkE, scale=scale)
    return found[0], found[1]


def _efficient(
    q_BNlD: Tensor, k_BNkD: Tensor, v_BNkE: Tensor, bias: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """The log-sum-exp [B, N, l'] is padded to a multiple of 32 queries."""
    mask = None if bias is None else _whole_size(_aligned(bias), q_BNlD, k_BNkD)
    found = torch._scaled_dot_product_efficient_attention(q_BNlD, k_BNkD, v_BNkE, mask, True, scale=scale)
    return found[0], found[1]


def _aligned(bias: Tensor) -> Tensor:
    """Return the bias, of any shape, with aligned rows: a copy only if they are not, and then with its own shape."""
    keys, rows = bias.shape[-1], zip(bias.shape[:-1], bias.stride()[:-1], strict=True)
    starts = (bias.storage_offset(), *(stride for size, stride in rows if size > 1))
    if bias.stride(-1) == 1 and all(start % BIAS_MULTIPLE == 0 for start in starts):
        return bias
    return F.pad(bias, (0, -keys % BIAS_MULTIPLE)).narrow(-1, 0, keys)


def _written_out(
    q_BNlD: Tensor, k_BNkD: Tensor, v_BNkE: Tensor, bias: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    logits_BNlk = (wide(q_BNlD) @ wide(k_BNkD).mT) * scale
    logits_BNlk = logits_BNlk if bias is None else logits_BNlk + wide(bias)
    out_BNlE = logits_BNlk.softmax(-1) @ wide(v_BNkE)
    return out_BNlE.to(q_BNlD.dtype), logits_BNlk.logsumexp(-1)


ON_CPU = LseKernel("flash for CPUs", _on_cpu)
WITHOUT_VALUES = LseKernel("of a GPU, without values", _flash_for_cpus)
CUDNN = LseKernel("cudnn", _cudnn, reuses_keys=True, multiple=HEAD_MULTIPLE)
FLASH = LseKernel("flash", _flash, reuses_keys=True, multiple=HEAD_MULTIPLE)
EFFICIENT = LseKernel("memory-efficient", _efficient, multiple=HEAD_MULTIPLE)
WRITTEN_OUT = LseKernel("written out", _written_out)
