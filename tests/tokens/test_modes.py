"""Which attention calls go the way of the mode: also those whose queries are tokens alone, beside keys of text."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from patchpar.comm.collectives import Communicator
from patchpar.plan.attention_mode import AttentionMode
from patchpar.plan.mesh import Axis
from patchpar.shard.attention.dispatch import attend_together
from patchpar.shard.transformer.attention import TokenSplit
from patchpar.shard.transformer.install import TransformerSharder
from tests.unit.threads import on_threads

from .ranks import LIMIT, TRANSFORMERS, error, plain, plan_of, predictions

PRX = "PRXTransformer2DModel"  # its text is seen, but sees nothing
LUMINA = "LuminaNextDiT2DModel"  # makes a mask of the queries that are here


@pytest.mark.parametrize(("name", "goes"), [(PRX, True), (LUMINA, False)])
def test_keys_go_round(name: str, goes: bool) -> None:
    plan, tiny = plan_of(name), TRANSFORMERS[name]
    models = [tiny.build() for _ in range(3)]

    def on_rank(transport: Any) -> Any:
        comm = Communicator(transport)
        comm.traffic.events = []
        axis = Axis("patch", transport.rank, 3, (0, 1, 2))
        mode = partial(attend_together, AttentionMode(algorithm="ring"))
        model = models[transport.rank]
        shard = TransformerSharder(model, plan, TokenSplit(comm, axis, mode))
        with torch.no_grad():
            found = predictions(shard.denoise(model.forward, **tiny.call(0)))
        return found, {event.kind for event in comm.traffic.events if " attention " in event.where}

    results = on_threads(3, on_rank, deadline=30.0)
    assert error([found for found, _ in results], plain(name, 0)) <= LIMIT
    assert ["kv" in kinds for _, kinds in results] == [goes] * 3
