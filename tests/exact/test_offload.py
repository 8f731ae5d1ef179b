"""Weights of a UNet that come and go (group offload), with its image in bands."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from patchpar.comm.collectives import Communicator
from patchpar.errors import UnsupportedModel
from patchpar.plan.mesh import Axis
from patchpar.strategies.exact import ExactPatch
from tests.breadth import first_of
from tests.exact import denoisers
from tests.tensors import relative
from tests.unit.threads import on_threads

CPU = torch.device("cpu")
LIMIT = 1e-5


def in_bands(models: list[Any], exchange: str) -> list[Any]:
    """What each rank predicts, or the error it raises."""

    def on_rank(transport: Any) -> Any:
        comm, axis = Communicator(transport), Axis("patch", transport.rank, 2, (0, 1))
        model = models[transport.rank]
        bands: Any = ExactPatch().install(model, comm, axis, verifications=None)
        bands.exchange = exchange
        with torch.no_grad():
            try:
                return bands.denoise(model.forward, **denoisers.call("sd", 16, 8))[0]
            finally:
                bands.restore()

    return on_threads(2, on_rank, deadline=60.0)


@pytest.mark.usefixtures("group_offload")
@pytest.mark.parametrize("kind", first_of(["block_level", "leaf_level"], "leaf_level"))
def test_groups_of_layers(kind: str, tmp_path: Path) -> None:
    """A convolution with its halo, and a norm with the moments of all bands, read weights without their forward.

    Weights are on disk while they are not used: what is read too early is nothing.
    """
    models: list[Any] = [denoisers.build("sd") for _ in range(2)]
    with torch.no_grad():
        want = models[0](**denoisers.call("sd", 16, 8))[0]
    groups = {"num_blocks_per_group": 1} if kind == "block_level" else {}
    for rank, model in enumerate(models):
        folder = str(tmp_path / f"weights {rank}")
        model.enable_group_offload(CPU, CPU, offload_type=kind, offload_to_disk_path=folder, **groups)
    for got in in_bands(models, "on"):
        assert relative(got, want) <= LIMIT
    assert relative(in_bands(models, "off")[0], want) > 100 * LIMIT


@pytest.mark.usefixtures("group_offload")
def test_groups_that_come_to_another_device() -> None:
    models: list[Any] = [denoisers.build("sd") for _ in range(2)]
    for model in models:
        model.enable_group_offload(torch.device("cuda:1"), CPU, offload_type="leaf_level")
    for found in in_bands(models, "on"):
        assert isinstance(found, UnsupportedModel)
        assert "are loaded to cuda:1, but this rank is on cpu: use onload_device" in str(found)
