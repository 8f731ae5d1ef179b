"""Small networks whose weights are hard to shard, each for one reason."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from tests.tensors import noise

WIDTH = 24


class Block(nn.Module):
    """One block: a bias in half precision, an odd number of bytes, a buffer, and a weight that is transposed."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.linear.weight = nn.Parameter(self.linear.weight.detach().t())
        self.shift = nn.Parameter(torch.randn(width).half())
        self.flag = nn.Parameter(torch.tensor([True, False, True]), requires_grad=False)
        self.register_buffer("scale", torch.rand(()) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x) * self.scale + self.shift) + self.flag.sum()


class Chain(nn.Module):
    """Blocks one after the other, in `order` if given."""

    def __init__(self, count: int = 5, order: tuple[int, ...] | None = None) -> None:
        super().__init__()
        self.first, self.blocks = nn.Linear(WIDTH, WIDTH), nn.ModuleList(Block(WIDTH) for _ in range(count))
        self.order = order or tuple(range(count))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for index in self.order:
            x = self.blocks[index](x)
        return x


class Tied(Chain):
    """One weight in two blocks, one in a block and outside, one twice in a block."""

    def __init__(self) -> None:
        super().__init__()
        first, second, third, fourth, _ = self.blocks
        second.linear.weight = first.linear.weight
        third.linear.bias = self.first.bias
        fourth.again = fourth.shift


class ReadOutside(Chain):
    """Code outside the blocks reads weights of two of them, and one block gives out its own weight."""

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x) * self.blocks[1].shift.float()
        return out + self.blocks[4].forward(out)


class Nested(Chain):
    """A block that calls another one, which has the same slot, and goes on."""

    def __init__(self) -> None:
        super().__init__()
        outer, inner = self.blocks[0], self.blocks[2]
        plain = outer.forward

        def forward(x: Tensor) -> Tensor:
            return plain(inner(plain(x)))

        outer.forward = forward


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "chain": Chain,
    "backwards": lambda: Chain(order=(4, 3, 2, 1, 0)),
    "several times": lambda: Chain(order=(0, 1, 1, 0, 2, 4, 2)),
    "tied": Tied,
    "read outside": ReadOutside,
    "nested": Nested,
}


def build(name: str) -> nn.Module:
    """The same weights every time."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return NETWORKS[name]().eval().requires_grad_(False)


def sample() -> Tensor:
    """An input [2, width] of all of them."""
    return noise(2, WIDTH)
