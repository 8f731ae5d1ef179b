"""Refusal of stale keys and values that do not fit the device, before the first of them is stored."""

import torch

from patchpar.errors import PlanError
from patchpar.launch.accelerators import free_bytes
from patchpar.launch.host_memory import free_memory
from patchpar.plan.byte_sizes import readable_bytes
from patchpar.shard.stale.cache import StaleBytes
from patchpar.shard.stale.stale_layout import StaleLayout


def expected_bytes(layout: StaleLayout, layers: float) -> StaleBytes:
    """Return the bytes of stale keys and values of a call with the attention of so many such layers."""
    one = layout.num_bytes
    arriving = round(one.arriving * layers) + layout.window_bytes
    return StaleBytes(round(one.held * layers) + layout.workspace_bytes, arriving)


def check_room(layout: StaleLayout, layers: float, device: torch.device, strategy: str) -> None:
    """Raise PlanError if the stale keys and values of a call do not fit: on the CPU, those of all ranks together."""
    expected, free = expected_bytes(layout, layers), free_bytes(device)
    ranks, memory = 1, f"of {device}"
    if device.type == "cpu":
        ranks, free, memory = layout.axis.size, free_memory(), f"for {layout.axis.size} CPU ranks"
    if free is None or ranks * expected.total <= free:
        return
    raise PlanError(
        f"strategy {strategy} keeps {readable_bytes(expected.held)} of keys and values for the next step on each rank, "
        f"and receives {readable_bytes(expected.arriving)} more, but only {readable_bytes(free)} {memory} are free: "
        "use strategy exact, which keeps none, fresh-edges:context=pooled, which keeps averages, or a smaller image"
    )
