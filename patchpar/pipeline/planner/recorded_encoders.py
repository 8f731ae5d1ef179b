"""Encoders on one rank of an image (`encoders=one`), recorded: what the first rank sends, the others receive.

The others know the form of a message only from the first rank, which is recorded before them.
"""

import io
import pickle
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from patchpar.comm.collectives import Communicator
from patchpar.comm.transport import TensorSpec
from patchpar.plan.mesh import Axis
from patchpar.shard.encoders.absent_weights import weights_of
from patchpar.shard.encoders.transfer import HEADER, PackedValue, Unpickler, ValueTransfer


class EncodedValues:
    """What the encoders of a call return, in order, as the first rank sends it."""

    def __init__(self) -> None:
        self._values: list[PackedValue] = []
        self._next = 0

    @property
    def are_known(self) -> bool:
        """Whether a first rank has been recorded."""
        return bool(self._values)

    def begin(self) -> None:
        """Begin a call."""
        self._next = 0

    def put(self, value: PackedValue) -> None:
        """Keep the next value of a call."""
        self._values[self._next : self._next + 1] = [value]
        self._next += 1

    def take(self) -> PackedValue:
        """Return the next value of a call."""
        self._next += 1
        return self._values[self._next - 1]


class RecordedTransfer(ValueTransfer):
    """Sends as ValueTransfer does, and receives messages without values; their forms are in `encoded`."""

    def __init__(self, comm: Communicator, axis: Axis, encoded: EncodedValues) -> None:
        super().__init__(comm, axis)
        self._encoded = encoded

    def send(self, where: str, packed: PackedValue) -> None:
        """See ValueTransfer."""
        self._encoded.put(packed)
        super().send(where, packed)

    def receive(self, where: str) -> Any:
        """See ValueTransfer."""
        packed = self._encoded.take()
        self._receive(where, HEADER)
        self._receive(where, TensorSpec((len(packed.pickled),), torch.uint8))
        layouts, pickled = pickle.loads(packed.pickled)  # written by this process
        received = self._receive(where, *(layout.sent for layout in layouts)) if layouts else []
        tensors = [layout.rebuild(x) for layout, x in zip(layouts, received, strict=True)]
        return Unpickler(io.BytesIO(pickled), tensors).load()


class RecordedAbsence:
    """The weights of `networks`, by name, without memory from `take_out` to `give_back`; see AbsentWeights."""

    def __init__(self, networks: Mapping[str, nn.Module], others: Iterable[nn.Module]) -> None:
        shared = {id(weight) for network in others for weight in network.parameters()}
        found = [each for network in networks.values() for each in weights_of(network)]
        self._weights = [each for each in found if id(each[-1]) not in shared]

    def take_out(self, device: torch.device) -> None:
        """Let the networks have no bytes of weights."""
        for module, name, weight in self._weights:
            module._parameters[name] = nn.Parameter(weight.new_empty(0), requires_grad=False)

    def give_back(self, comm: Communicator, axis: Axis) -> None:
        """Let the networks have their weights; nothing is sent."""
        for module, name, weight in self._weights:
            module._parameters[name] = weight
