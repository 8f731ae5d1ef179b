"""How torch's attention leaves its output in memory, which models may count on."""

from torch import Tensor


def as_torch_lays(out_BNlD: Tensor) -> Tensor:
    """The same numbers, [B, N, l, D], with the heads of a token side by side: what `view` takes for [B, l, N * D]."""
    return out_BNlD.transpose(1, 2).contiguous().transpose(1, 2) if out_BNlD.ndim == 4 else out_BNlD
