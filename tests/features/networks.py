"""Small blocks whose features are divided, or are not, each for one reason."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from patchpar.shard.transformer.probe.capture import CallArguments, CapturedBlock
from tests.tensors import noise

WIDTH, HEADS, TOKENS = 12, 3, 7


class Gated(nn.Module):
    """A feed-forward network whose gates lie beside their values, in one Linear."""

    def __init__(self) -> None:
        super().__init__()
        self.proj, self.out = nn.Linear(WIDTH, 40), nn.Linear(20, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        values, gates = self.proj(x).chunk(2, -1)
        return x + self.out(values * F.gelu(gates))


class Fused(nn.Module):
    """Queries, keys and values in one Linear, queries with a norm over all heads; a number of heads in an attribute."""

    def __init__(self, norm: type[nn.Module] = nn.RMSNorm) -> None:
        super().__init__()
        self.qkv, self.out, self.heads = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), HEADS
        self.norm = norm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in (self.norm(q), k, v))
        return x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Scaled(Fused):
    """A factor for each feature of the queries, of all heads, is an argument, as rotary tables may be."""

    def forward(self, x: Tensor, factor: Tensor | None = None) -> Tensor:
        assert factor is not None
        q, k, v = self.qkv(x).chunk(3, -1)
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in (q * factor, k, v))
        return x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Adapted(nn.Module):
    """Linears with a low-rank one beside each, as LoRA has them, and one feed-forward network called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH)
        self.up_a, self.up_b = nn.Linear(WIDTH, 4, bias=False), nn.Linear(4, 24, bias=False)
        self.down_a, self.down_b = nn.Linear(24, 4, bias=False), nn.Linear(4, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            y = F.gelu(self.up(x) + self.up_b(self.up_a(x)))
            x = x + self.down(y) + self.down_b(self.down_a(y))
        return x


class Mixed(nn.Module):
    """Features meet in a softmax, so that no rank can hold some of them; beside it a network that can be divided."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(self.first(x).softmax(-1))


class OwnForward(nn.Linear):
    """A Linear that does not run torch's code, as a quantised one."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


class Quantised(Gated):
    """The second Linear cannot be divided, so that the first one is not, either."""

    def __init__(self) -> None:
        super().__init__()
        self.out = OwnForward(20, WIDTH)


BLOCKS: dict[str, Callable[[], nn.Module]] = {
    "gated": Gated,
    "fused": Fused,
    "fused, layer norm": lambda: Fused(nn.LayerNorm),
    "scaled": Scaled,
    "adapted": Adapted,
    "mixed": Mixed,
    "quantised": Quantised,
}


def captured(name: str, dtype: torch.dtype = torch.float32) -> CapturedBlock:
    """A block of that name with the same weights every time, and one call of it."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        block = BLOCKS[name]()
        for parameter in block.parameters():
            parameter.data += 0.1 * torch.randn_like(parameter)
    block = block.to(dtype).requires_grad_(False)
    kwargs = {"factor": noise(TOKENS, WIDTH, seed=1).to(dtype)} if name == "scaled" else {}
    arguments = CallArguments.of(block, (noise(2, TOKENS, WIDTH).to(dtype),), kwargs)
    return CapturedBlock("blocks", block, arguments, paths=["blocks.0"])
