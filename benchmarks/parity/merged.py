"""Attention in half precision over parts of the keys that are merged, compared with one kernel over all keys.

    python -m benchmarks.parity.merged --write docs/figures/merged-attention.md

Fails if parts by the kernel of the format are no farther off than those of ranks: the control.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.page import publish
from benchmarks.parity import parsed
from patchpar.shard.attention.partial import Partial, attend_locally, merge_partials

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
SHAPE = (2, 8, 1024, 64)  # batch, heads, tokens, width of a head
PARTS = (2, 4, 8)
SEEDS = range(8)


def inputs_of(seed: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values [B, N, l, D] of a half format. Logits have a standard deviation of about 2."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(SHAPE, generator=generator) for _ in range(3))
    return (2 * q).to(dtype), k.to(dtype), v.to(dtype)


def by_kernel(q: Tensor, k: Tensor, v: Tensor) -> Partial:
    """Return attention [B, N, l, D] over some keys as torch's kernel of a half format computes it."""
    return Partial(*torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v)[:2])


def merged(
    attend_part: Callable[[Tensor, Tensor, Tensor], Partial], q: Tensor, k: Tensor, v: Tensor, parts: int
) -> Tensor:
    """Return attention [B, N, l, D] over all keys, merged of `parts` of them."""
    pairs = zip(k.chunk(parts, dim=2), v.chunk(parts, dim=2), strict=True)
    return merge_partials(attend_part(q, k_part, v_part) for k_part, v_part in pairs).out_BNlD


def errors(dtype: torch.dtype, parts: int) -> tuple[float, float, float]:
    """Return mean relative errors against fp32: of one kernel, of ours, and of the kernel in parts."""
    from tests.tensors import relative

    sums = [0.0, 0.0, 0.0]
    for seed in SEEDS:
        q, k, v = inputs_of(seed, dtype)
        truth = F.scaled_dot_product_attention(q.float(), k.float(), v.float())
        found = (
            F.scaled_dot_product_attention(q, k, v),
            merged(attend_locally, q, k, v, parts),
            merged(by_kernel, q, k, v, parts),
        )
        for at, each in enumerate(found):
            sums[at] += relative(each.float(), truth) / len(SEEDS)
    return sums[0], sums[1], sums[2]


def lines_of(names: Sequence[str]) -> Iterator[str]:
    """Yield the table, and what stands above it. Raises ValueError if the control fails."""
    yield "# Merged attention in half precision"
    yield ""
    yield (
        "How far attention in half precision is from fp32, mean relative error: by one kernel over all keys, and over "
        "parts of the keys that are merged by their log-sum-exp in fp32. `parts of ranks`: each is computed in fp32 "
        "and rounded, as ranks on CPUs do. `parts by the kernel`: by torch's kernel of the format, which rounds "
        f"probabilities besides. {SHAPE[2]:,} tokens, {SHAPE[1]} heads of width {SHAPE[3]}, {len(SEEDS)} inputs, "
        "CPU. Measured by `python -m benchmarks.parity.merged`, written with `--write "
        "docs/figures/merged-attention.md`."
    )
    yield ""
    yield "| format | parts | one kernel | parts of ranks | farther off, % | parts by the kernel | its parts, % |"
    yield "|---|---|---|---|---|---|---|"
    for name in names:
        for parts in PARTS:
            one, ours, theirs = errors(DTYPES[name], parts)
            if ours >= theirs:
                raise ValueError(f"{name}, {parts} parts: the kernel of the format is no farther off")
            more = [f"{100 * (each / one - 1):+.0f}" for each in (ours, theirs)]
            yield f"| {name} | {parts} | {one:.2e} | {ours:.2e} | {more[0]} | {theirs:.2e} | {more[1]} |"


def main() -> int:
    """Print the table, and write it."""
    options = parsed(__doc__, tuple(DTYPES), has_steps=False)
    torch.set_num_threads(1)
    publish(lines_of(options.names), options.write)
    return 0


if __name__ == "__main__":
    sys.exit(main())
