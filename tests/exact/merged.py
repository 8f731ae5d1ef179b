"""Token merging in the structure of tomesd (Bolya and Hoffman 2023, arXiv:2303.17604), in a few lines of our own.

Half of the tokens of a self-attention are merged with those that they resemble most, and get its result. What it has in
common with the library: blocks get another class, a hook on the network keeps the size of the image, the tokens that
others are merged with are chosen at random, by a generator that begins with torch's state, and only in a batch of an
even size, in which both guidance branches are expected.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


def merge_tokens(unet: Any) -> None:
    """Put it into the blocks of the finest level."""
    info: dict[str, Any] = {"size": None, "generator": None}

    def keep_size(module: nn.Module, args: Any) -> None:
        info["size"] = tuple(args[0].shape[-2:])

    unet.register_forward_pre_hook(keep_size)
    for block in [each for each in unet.modules() if type(each).__name__ == "BasicTransformerBlock"]:
        block.__class__ = _merging(type(block))
        block.info = info


def _merging(kind: Any) -> type[nn.Module]:
    class MergingBlock(kind):
        info: dict[str, Any]

        def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            height, width = self.info["size"]
            own = self.attn1.forward
            if hidden_states.shape[1] == height * width:
                merge, unmerge = _matched(self.norm1(hidden_states), self.info)
                self.attn1.forward = lambda x, *a, **k: unmerge(own(merge(x), *a, **k))
            try:
                result: Tensor = super().forward(hidden_states, *args, **kwargs)
            finally:
                vars(self.attn1).pop("forward", None)
            return result

    return MergingBlock


def _matched(x_BNC: Tensor, info: dict[str, Any]) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
    """What takes half of the tokens away, and what gives them the results of those that they resemble most."""
    if info["generator"] is None:
        info["generator"] = torch.Generator().set_state(torch.get_rng_state())
    pairs = x_BNC.shape[1] // 2
    chosen = torch.zeros(pairs, dtype=torch.int64)
    if len(x_BNC) % 2 == 0:
        chosen = torch.randint(2, (pairs,), generator=info["generator"])
    kept = 2 * torch.arange(pairs) + chosen
    merged = 2 * torch.arange(pairs) + 1 - chosen
    unit = x_BNC / x_BNC.norm(dim=-1, keepdim=True)
    like_BM = (unit[:, merged] @ unit[:, kept].transpose(1, 2)).argmax(-1)

    def merge(x: Tensor) -> Tensor:
        return x[:, kept]

    def unmerge(x: Tensor) -> Tensor:
        out = x.new_empty(len(x), 2 * pairs, x.shape[-1])
        out[:, kept] = x
        out[:, merged] = x.gather(1, like_BM[..., None].expand(-1, -1, x.shape[-1]))
        return out

    return merge, unmerge
