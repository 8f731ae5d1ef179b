"""Teaching a convolutional UNet what belongs where.

Nothing in this UNet says where a token is, except the zero padding of its convolutions. Left to itself it learns the
distance to the nearest border, draws both objects of a caption on both sides and stays there for a very long time. So
while it is trained, small linear heads must read two things from the features at its lowest resolution: before
attention the horizontal place of every token, which convolutions carry from the border inwards (padding as a source of
position: Islam, Jia and Bruce, arXiv:2001.08248), and after attention the object that the caption puts on the token's
half of the image. The heads are no part of the packaged model.
"""

from __future__ import annotations

import torch
from diffusers import SD3Transformer2DModel, UNet2DConditionModel
from torch import Tensor, nn
from torch.nn import functional

from training.scenes import LOOKS

POSITION_WEIGHT, LOOK_WEIGHT = 0.3, 0.1
"""Knowing nothing costs 1/3 for places in -1..1 and log 21 for looks."""
FROM_TIMESTEP = 500
"""Looks are asked for at this noise level and above, where only the caption can tell."""


class GuideHeads(nn.Module):
    """Heads on the resnets before and on the transformers of the blocks at the lowest resolution."""

    def __init__(self, unet: UNet2DConditionModel) -> None:
        super().__init__()
        down, middle, up = unet.down_blocks[-1], unet.mid_block, unet.up_blocks[0]
        before = [*down.resnets, middle.resnets[0], *up.resnets]
        after = [*down.attentions, *middle.attentions, *up.attentions]
        self.positions = nn.ModuleList(nn.Conv2d(module.out_channels, 1, 1) for module in before)
        self.looks = nn.ModuleList(nn.Conv2d(module.in_channels, len(LOOKS), 1) for module in after)
        for head in (*self.positions, *self.looks):
            nn.init.zeros_(head.weight)
        self._features: dict[nn.Module, Tensor] = {}
        for module, head in zip((*before, *after), (*self.positions, *self.looks), strict=True):
            module.register_forward_hook(self._keep_for(head))

    def _keep_for(self, head: nn.Module):
        def hook(_module: nn.Module, _inputs: tuple, output: Tensor | tuple) -> None:
            self._features[head] = output if isinstance(output, Tensor) else output[0]

        return hook

    def loss(self, looks_B2: Tensor, timestep_B: Tensor) -> tuple[Tensor, Tensor]:
        """The errors of places and looks for the features (B, C, H, W) of the last forward."""
        asked = torch.where(timestep_B[:, None] < FROM_TIMESTEP, -1, looks_B2)
        position = [_position_error(head(self._features[head].float())) for head in self.positions]
        look = [_look_error(head(self._features[head].float()), asked) for head in self.looks]
        self._features.clear()
        return torch.stack(position).mean(), torch.stack(look).mean()


class LookHeads(nn.Module):
    """Heads on the image tokens of a joint transformer from its second block to the last but one: only looks.

    Its tokens know their places from the start.
    """

    def __init__(self, transformer: SD3Transformer2DModel) -> None:
        super().__init__()
        blocks = transformer.transformer_blocks[1:-1]
        self.looks = nn.ModuleList(nn.Linear(transformer.inner_dim, len(LOOKS)) for _ in blocks)
        for head in self.looks:
            nn.init.zeros_(head.weight)
        self._features: dict[nn.Module, Tensor] = {}
        for block, head in zip(blocks, self.looks, strict=True):
            block.register_forward_hook(self._keep_for(head))

    def _keep_for(self, head: nn.Module):
        def hook(_module: nn.Module, _inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
            self._features[head] = output[1]

        return hook

    def loss(self, looks_B2: Tensor, timestep_B: Tensor, *, rows: int) -> Tensor:
        """The error of looks for the image tokens (B, N, C), that many rows of them, of the last forward."""
        asked = torch.where(timestep_B[:, None] < FROM_TIMESTEP, -1, looks_B2)
        guesses = (head(self._features[head].float()).unflatten(1, (rows, -1)).movedim(-1, 1) for head in self.looks)
        errors = [_look_error(guess, asked) for guess in guesses]
        self._features.clear()
        return torch.stack(errors).mean()


def _position_error(guess_B1HW: Tensor) -> Tensor:
    position = torch.linspace(-1, 1, guess_B1HW.shape[-1], device=guess_B1HW.device)
    return (guess_B1HW - position).square().mean()


def _look_error(guess_BLHW: Tensor, asked_B2: Tensor) -> Tensor:
    batch, _, height, width = guess_BLHW.shape
    per_column = asked_B2.repeat_interleave(width // 2, 1)
    target = per_column[:, None].expand(batch, height, width)
    error = functional.cross_entropy(guess_BLHW, target, ignore_index=-1, reduction="sum")
    return error / (target >= 0).sum().clamp_min(1)
