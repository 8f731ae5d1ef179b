"""The merge of attention over parts of the keys by their log-sum-exp (ring attention, Liu et al., arXiv:2310.01889).

Shape letters: B batch, N heads, l queries, D width of a value.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from patchpar.comm.kernels.fused_op import fused_op
from patchpar.comm.kernels.program import Program
from patchpar.shard.kernels.map_layout import power_of_2
from patchpar.shard.precision import wide

TILE = 4096  # values of an output that a program reads at once


def merge_in_turn(parts: Iterable[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Merge outputs [B, N, l, D] and log-sum-exps [B, N, l] one by one in fp32 or wider, each as it is yielded."""
    out: Tensor | None = None
    lse: Tensor | None = None
    dtype = torch.float32
    for new_out, new_lse in parts:
        if out is None or lse is None:
            out, lse, dtype = new_out, new_lse, new_out.dtype
            continue
        ahead_BNl = (new_lse - lse).nan_to_num()  # -inf in both for a query with all keys of both masked
        out = torch.lerp(wide(out), wide(new_out), torch.sigmoid(ahead_BNl).unsqueeze(-1))
        lse = torch.logaddexp(lse, new_lse)
    assert out is not None, "attention over no keys"
    assert lse is not None
    return out.to(dtype), lse


def merge_eager(out: Tensor, lse: Tensor, outs: Sequence[Tensor], lses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Merge `out` [B, N, l, D] and `lse` [B, N, l] with others of the same shapes and strides."""
    return merge_in_turn([(out, lse), *zip(outs, lses, strict=True)])


def empty_merged(out: Tensor, lse: Tensor, outs: Sequence[Tensor], lses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return empty tensors for the merged output [B, N, l, D] and log-sum-exp [B, N, l]."""
    return torch.empty_like(out), torch.empty_like(lse)


_MERGE = Program("patchpar.shard.kernels.programs.merge_partials", "merge_program")


def launch_merge(out: Tensor, lse: Tensor, outs: Sequence[Tensor], lses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Launch the kernel: programs for some queries of one head each. See `merge_eager`: [B, N, l, D] and [B, N, l].

    Of outputs, and of log-sum-exps, all have one memory layout.
    """
    merged, merged_lse = empty_merged(out, lse, outs, lses)
    batch, heads, queries, width = out.shape
    columns = power_of_2(width)
    rows = max(1, TILE // columns)
    _MERGE.launch(
        (-(-queries // rows), heads, batch),
        ((out, *outs), (lse, *lses), merged, merged_lse),
        (queries, out.stride()[:3], lse.stride(), merged.stride()[:3], merged_lse.stride()),
        PARTS=1 + len(outs),
        WIDTH=width,
        COLUMNS=columns,
        ROWS=rows,
        num_warps=8,
    )
    return merged, merged_lse


merge_attention = fused_op(
    "merge_attention(Tensor out, Tensor lse, Tensor[] outs, Tensor[] lses) -> (Tensor, Tensor)",
    eager=merge_eager,
    launch=launch_merge,
    fake=empty_merged,
)
