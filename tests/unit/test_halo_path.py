"""From the hook of a convolution to the transport an edge row passes through few objects."""

import sys
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from patchpar.comm.collectives import Communicator
from patchpar.plan.bands import Bands
from patchpar.plan.mesh import Axis
from patchpar.shard.hooks import HookSet
from patchpar.shard.local_patch import LocalPatch
from patchpar.shard.unet.layer_hooks import ConvHook

from .threads import on_threads

MOST = 6


def tensors_of(value: Any) -> Iterator[Tensor]:
    """Tensors in arguments, in containers and dataclasses too."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple, dict)):
        for each in value.values() if isinstance(value, dict) else value:
            yield from tensors_of(each)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from tensors_of(getattr(value, field.name, None))  # of one that is being made


class Relay:
    """One object more between a communicator and its transport."""

    __module__ = "patchpar.relay"

    def __init__(self, transport: Any) -> None:
        self._transport = transport

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def send_recv(self, outgoing: Any, incoming: Any, where: str) -> Any:
        return self._transport.send_recv(outgoing, incoming, where)


def handed_on(transport: Any, *, relayed: bool = False) -> list[str]:
    """Classes of this package whose methods have the row in hand, from the hook to the transport, both included."""
    comm = Communicator(Relay(transport) if relayed else transport)  # type: ignore[arg-type]
    part = LocalPatch(comm, Axis("patch", transport.rank, 2, (0, 1)), bands=Bands((0, 4, 8)))
    conv, x, seen = nn.Conv2d(1, 1, 3, padding=1), torch.ones(1, 1, 4, 4), dict[str, None]()
    memory, send_recv = x.untyped_storage().data_ptr(), type(transport).send_recv

    def note(frame: FrameType, event: str, argument: object) -> None:
        owner = frame.f_locals.get("self")
        if event == "call" and type(owner).__module__.startswith("patchpar."):
            found = tensors_of(dict(frame.f_locals))
            if any(each.untyped_storage().data_ptr() == memory for each in found):
                seen[type(owner).__name__] = None
        if frame.f_code is send_recv.__code__:
            sys.setprofile(None)

    with HookSet() as hooks, torch.no_grad():
        hooks.install(conv, ConvHook(part, "conv", reads_sample=False, trailing=0), "patchpar_test")
        sys.setprofile(note)
        try:
            conv(x)
        finally:
            sys.setprofile(None)
    return list(seen)


def test_an_edge_row_passes_through_few_objects() -> None:
    for found in on_threads(2, handed_on):
        assert isinstance(found, list), found
        assert found[0] == "ConvHook"
        assert found[-1] == "SharedMemoryTransport"
        assert "Communicator" in found
        assert len(found) <= MOST, found


def test_an_object_more_is_counted() -> None:
    plain, relayed = (on_threads(2, partial(handed_on, relayed=each))[0] for each in (False, True))
    assert isinstance(plain, list)
    assert relayed == [*plain[:-1], "Relay", plain[-1]]
