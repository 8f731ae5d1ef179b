"""This rank's keys and values among those of all ranks, in one buffer that attention reads, and in a message.

Shape letters: T tokens of the buffer, c common ones (first among the local ones), l this rank's own, B batch, N heads,
D head width. Buffers are [tokens, 2, B, N, D], keys before values.
"""

from torch import Tensor

from patchpar.comm.kernels.fused_op import fused_op, nothing
from patchpar.comm.kernels.program import Program
from patchpar.shard.kernels.map_layout import power_of_2

TILE = 4096  # numbers that a program copies


def write_tokens_eager(
    attended: Tensor, key: Tensor, value: Tensor, start: int, common: int, message: Tensor | None, common_start: int = 0
) -> None:
    """Write `key` and `value` [B, c + l, N, D] to `attended` [T, 2, B, N, D], and own tokens to `message` as well.

    Common tokens go to `common_start` on, own ones to `start` on. `message` [l, 2, B, N, D].
    """
    own = attended.narrow(0, start, key.shape[1] - common)
    for index, x_BlND in enumerate((key, value)):
        if common:
            attended.narrow(0, common_start, common)[:, index].copy_(x_BlND[:, :common].transpose(0, 1))
        own[:, index].copy_(x_BlND[:, common:].transpose(0, 1))
    if message is not None:
        message.copy_(own)


_WRITE_TOKENS = Program("patchpar.shard.kernels.programs.write_tokens", "write_tokens_program")


def launch_write_tokens(
    attended: Tensor, key: Tensor, value: Tensor, start: int, common: int, message: Tensor | None, common_start: int = 0
) -> None:
    """Launch the kernel: a program for every few tokens of each head of keys and of values.

    See the twin: `key` and `value` [B, c + l, N, D], `attended` [T, 2, B, N, D], `message` [l, 2, B, N, D].
    """
    of_key, of_value = key.stride(), value.stride()
    if of_key[3] != 1 or of_value[3] != 1:  # the program reads the numbers of a head one after another
        key, value = (x if x.stride(3) == 1 else x.contiguous() for x in (key, value))
        of_key, of_value = key.stride(), value.stride()
    batch, tokens, heads, width = key.shape
    columns = power_of_2(width)
    rows = max(1, TILE // columns)
    _WRITE_TOKENS.launch(
        (-(-tokens // rows), 2 * batch * heads),
        (attended, attended if message is None else message, key, value),
        (tokens, start, common, common_start, batch, heads, *of_key[:3], *of_value[:3]),
        WIDTH=width,
        COLUMNS=columns,
        ROWS=rows,
        HAS_MESSAGE=message is not None,
    )


write_tokens = fused_op(
    "write_tokens(Tensor(a!) attended, Tensor key, Tensor value, int start, int common, "
    "Tensor(b!)? message, int common_start=0) -> ()",
    eager=write_tokens_eager,
    launch=launch_write_tokens,
    fake=nothing,
)
