"""Marks come from inside a forward, and go without a trace."""

from types import SimpleNamespace

import torch
from torch import nn

from patchpar.pipeline.pipeline_call import HeartbeatHooks


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2))])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def test_every_block_is_a_mark_until_stopped():
    network, marks = Network(), []
    pulse = HeartbeatHooks(SimpleNamespace(components={"unet": network, "tokenizer": object()}), marks.append)
    network(torch.zeros(1, 2))
    assert marks == ["unet.blocks.0", "unet.blocks.1"]
    pulse.close()
    network(torch.zeros(1, 2))
    assert len(marks) == 2
    assert not any(block._forward_pre_hooks for block in network.modules())
