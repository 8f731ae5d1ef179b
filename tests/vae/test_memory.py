"""The memory and the work of one rank of n: an nth of what one process needs, and nothing of it is done twice."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import cache
from typing import Any

import diffusers
import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from patchpar.comm.collectives import Communicator
from patchpar.comm.transport import Incoming, Messages, Outgoing, Transport, Work
from patchpar.shard.vae.split import SplitMethod, VaeCall
from tests.breadth import first_of
from tests.unit.threads import on_threads

from .allocations import Allocations
from .autoencoders import axis_of, raised, structured

SLACK = 1.15
ROWS, COLUMNS = 32, 8  # of the latent
SHAPES = {"decode": (1, 4, ROWS, COLUMNS), "encode": (1, 3, 8 * ROWS, 8 * COLUMNS)}


def sdxl_like(*widths: int, groups: int, **device: Any) -> Any:
    """The VAE of SD and SDXL; with its own widths of 128 to 512 channels it is theirs."""
    with torch.device(device.get("device", "cpu")):
        return diffusers.AutoencoderKL(
            block_out_channels=widths,
            down_block_types=("DownEncoderBlock2D",) * 4,
            up_block_types=("UpDecoderBlock2D",) * 4,
            layers_per_block=2,
            norm_num_groups=groups,
        ).eval()


@cache
def narrow(dtype: torch.dtype) -> Any:
    """An eighth as wide as SDXL's, with all its layers."""
    return sdxl_like(16, 32, 64, 64, groups=16).to(dtype)


def peak(vae: Any, call: VaeCall, split: SplitMethod | None = None) -> int:
    with torch.no_grad():
        if split is not None:
            split.takes(call)  # the corner that tells the scale is no part of it
        with Allocations() as found:
            if split is None:
                call.on(call.x)
            else:
                split(call, everywhere=False)
    return found.peak


@pytest.mark.parametrize(
    ("method", "world", "dtype"),
    [
        pytest.param("decode", 2, torch.float32, marks=pytest.mark.breadth),
        ("decode", 4, torch.float32),
        pytest.param("decode", 3, torch.bfloat16, marks=pytest.mark.breadth),
        pytest.param("encode", 4, torch.float32, marks=pytest.mark.breadth),
    ],
    ids=str,
)
def test_an_nth_of_the_peak(method: str, world: int, dtype: torch.dtype) -> None:
    x = structured(*SHAPES[method]).to(dtype)

    def of_rank(transport: Transport) -> int:
        vae = copy.deepcopy(narrow(dtype))
        split = SplitMethod(vae, method, (Communicator(transport), axis_of(transport, world)), None)
        return peak(vae, VaeCall(getattr(vae, method), x, (), {}), split)

    whole = peak(narrow(dtype), VaeCall(getattr(narrow(dtype), method), x, (), {}))
    gathered = 2 * ROWS * COLUMNS * 64 * dtype.itemsize  # keys and values of all
    for own in raised(on_threads(world, of_rank, deadline=60.0)):
        assert own <= SLACK / world * whole + gathered
        assert own >= 0.5 / world * whole  # or it is not counted


def test_the_counter_counts() -> None:
    with Allocations() as found:
        x = torch.ones(1000)
        y = x.view(10, 100) + 1
        del x, y
        torch.ones(100).add_(1)
    assert (found.peak, found.alive) == (8000, 0)


class Nowhere:
    """A way to ranks that do not exist: what comes from them has a shape and no values."""

    collectives = None

    def __init__(self, rank: int) -> None:
        self.rank, self.device, self.deadline = rank, torch.device("meta"), 1.0

    def send_recv(self, outgoing: Sequence[Outgoing], incoming: Sequence[Incoming], where: str) -> Work[Messages]:
        return Arrived(incoming, where)

    def close(self) -> None:
        pass


class Arrived(Work[Messages]):
    def _receive(self, index: int) -> list[Tensor]:
        return [torch.empty(spec.shape, dtype=spec.dtype, device="meta") for spec in self.incoming[index].specs]


def attention_flops(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> int:
    """Of the CPU's flash attention, given shapes: torch counts that of GPUs only."""
    return int(sdpa_flop_count(query, key, value))


COUNTED = {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: attention_flops}


@cache
def operations(world: int, group_rank: int, method: str) -> dict[str, int]:
    """Multiplications and additions of one rank, by part of SDXL's own VAE, on no device.

    At 4096 x 4096 pixels where it decodes, 3072 x 3072 where it encodes.
    """
    vae = sdxl_like(128, 256, 512, 512, groups=32, device="meta")
    x = torch.empty((1, 4, 512, 512) if method == "decode" else (1, 3, 3072, 3072), device="meta")
    split = SplitMethod(vae, method, (Communicator(Nowhere(group_rank)), axis_of(Nowhere(group_rank), world)), None)
    call = VaeCall(getattr(vae, method), x, (), {})
    with torch.no_grad():
        split.takes(call)
        with FlopCounterMode(display=False, custom_mapping=COUNTED) as counter:
            call.on(x) if world == 1 else split(call, everywhere=False)
    counts = {name: sum(kinds.values()) for name, kinds in counter.get_flop_counts().items()}
    return {"all": counts["Global"], "middle": next(n for name, n in counts.items() if name.endswith(".mid_block"))}


@pytest.mark.parametrize(("method", "world"), first_of([("decode", 8), ("encode", 4)], ("encode", 4)))
def test_nothing_is_computed_twice(method: str, world: int) -> None:
    """But for border rows: of the 64 that each of 8 ranks has in the middle, two, and of the 96 of 4."""
    whole = operations(1, 0, method)
    assert whole["middle"] > 0.4 * whole["all"]  # attention: doing it on every rank would be half of the work
    for part in ("all", "middle"):
        inner, ends = operations(world, 1, method)[part], operations(world, world - 1, method)[part]
        own = (world - 2) * inner + 2 * ends
        assert whole[part] <= own <= 1.05 * whole[part]
