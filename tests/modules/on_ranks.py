"""Networks of other libraries split between processes, two pairs of them at the same time."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch.distributed as dist

from patchpar import shard_module
from tests.modules.networks import call_of, network
from tests.ranks import PoolRank
from tests.tensors import relative


def example(this: PoolRank, code: str) -> float:
    """Error of what an example of the docs computes. torch's default group is there already."""
    call = call_of("wan")
    names: dict[str, Any] = {
        "latents": call["x"],
        "t": call["timestep"],
        "text": call["context"],
        "network": network("wan"),
    }
    with patch.object(dist, "init_process_group", lambda: None):
        exec(code, names)
    names["handle"].transport.close()
    return relative(names["noise"], network("wan")(names["latents"], names["t"], context=names["text"]))


def sharded(this: PoolRank, name: str, folder: str) -> tuple[list[float], float, float]:
    """Errors of two calls, the error without exchange, and that after the handle was removed."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    module, plain = network(name), network(name)
    handle = shard_module(
        module, patch=2, group=groups[this.rank // 2], verify=Path(folder), ignore=("transformer_options",)
    )
    handle.begin()
    errors = []
    for step in range(2):
        errors.append(relative(module(**call_of(name, step)), plain(**call_of(name, step))))
        handle.step()
    handle.control(exchange="off")
    want = plain(**call_of(name))
    off = relative(module(**call_of(name)), want)
    handle.remove()
    handle.transport.close()
    return errors, off, float((module(**call_of(name)) - want).abs().max())
