"""What fits read of this rank's keys and values in an exact step: their means, and every few tokens, or all.

Shape letters: l own tokens, s sampled ones, X = 2, B (keys and values; batch), N heads, D head width.
"""

import torch
from torch import Tensor

from patchpar.comm.kernels.fused_op import fused_op, nothing
from patchpar.comm.kernels.program import Program
from patchpar.shard.kernels.map_layout import power_of_2

TILE = 2048  # numbers that a program reads at once


def sample_tokens_eager(
    own: Tensor,
    mean: Tensor,
    tokens: Tensor,
    mean_before: Tensor | None,
    tokens_before: Tensor | None,
    stride: int,
    continues: bool,
) -> None:
    """Make tokens `own` [l, X, N, D], or samples of them, the last ones, and the last ones those of the step before.

    `mean` [X, N, D] in fp32 and `tokens` [s, X, N, D], every `stride`-th, or all of them [l, X, N, D]; `mean_before`
    and `tokens_before` are alike. Unless it `continues`, nothing is known of the step before: it gets the new ones too,
    whatever was stored.
    """
    now_mean = own.mean(0, dtype=torch.float32)
    now_tokens = own if tokens.shape[0] == own.shape[0] else own[::stride]
    if mean_before is not None and tokens_before is not None:
        mean_before.copy_(mean if continues else now_mean)
        tokens_before.copy_(tokens if continues else now_tokens)
    mean.copy_(now_mean)
    tokens.copy_(now_tokens)


_SAMPLE_TOKENS = Program("patchpar.shard.kernels.programs.sample_tokens", "sample_tokens_program")


def launch_sample_tokens(
    own: Tensor,
    mean: Tensor,
    tokens: Tensor,
    mean_before: Tensor | None,
    tokens_before: Tensor | None,
    stride: int,
    continues: bool,
) -> None:
    """Launch the kernel for `own` [l, X, N, D]: a program for each head of keys or values of a sample. See the twin."""
    width = own.shape[-1]
    columns = power_of_2(width)
    _SAMPLE_TOKENS.launch(
        (mean.numel() // width,),
        (
            own,
            mean,
            tokens,
            mean if mean_before is None else mean_before,
            tokens if tokens_before is None else tokens_before,
        ),
        (own.shape[0], stride, own.stride(0)),
        WIDTH=width,
        COLUMNS=columns,
        ROWS=max(1, TILE // columns),
        HAS_BEFORE=tokens_before is not None,
        CONTINUES=continues,
        KEEPS_ALL=tokens.shape[0] == own.shape[0],
        num_warps=8,
    )


sample_tokens = fused_op(
    "sample_tokens(Tensor own, Tensor(a!) mean, Tensor(b!) tokens, Tensor(c!)? mean_before, Tensor(d!)? tokens_before, "
    "int stride, bool continues) -> ()",
    eager=sample_tokens_eager,
    launch=launch_sample_tokens,
    fake=nothing,
)
