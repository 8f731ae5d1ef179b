"""Teaching a convolutional UNet left from right.

Nothing in this UNet says where a token is, except the zero padding of its convolutions. Left to itself it learns the
distance to the nearest border, draws both objects of a caption on both sides and stays there for a very long time. So
while it is trained, small heads must read the horizontal place of every token from the features that attention is about
to see. Convolutions carry that from the border inwards within a few hundred steps (padding as a source of position:
Islam, Jia and Bruce, arXiv:2001.08248), and attention to the words then has something to hold on to. The heads are no
part of the packaged model.
"""

from __future__ import annotations

import torch
from diffusers import UNet2DConditionModel
from torch import Tensor, nn

WEIGHT = 0.3
"""Weight of the mean squared error of places in -1..1; knowing nothing costs 1/3."""


class PositionHeads(nn.Module):
    """Linear heads on the resnets that come before attention at the lowest resolution."""

    def __init__(self, unet: UNet2DConditionModel) -> None:
        super().__init__()
        watched = [*unet.down_blocks[-1].resnets, unet.mid_block.resnets[0], *unet.up_blocks[0].resnets]
        self.heads = nn.ModuleList(nn.Conv2d(resnet.out_channels, 1, 1) for resnet in watched)
        for head in self.heads:
            nn.init.zeros_(head.weight)
        self._seen: list[Tensor | None] = [None] * len(watched)
        for index, resnet in enumerate(watched):
            resnet.register_forward_hook(self._keep(index))

    def _keep(self, index: int):
        def hook(_module: nn.Module, _inputs: tuple, output: Tensor) -> None:
            self._seen[index] = output

        return hook

    def loss(self) -> Tensor:
        """How wrong the places read from the features (B, C, H, W) of the last forward are."""
        errors = []
        for head, features in zip(self.heads, self._seen, strict=True):
            place = torch.linspace(-1, 1, features.shape[-1], device=features.device)
            errors.append((head(features.float())[:, 0] - place).square().mean())
        self._seen = [None] * len(self._seen)
        return torch.stack(errors).mean()
