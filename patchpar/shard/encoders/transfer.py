"""Any picklable value from the first rank of an axis to all others: its tensors as they are, the rest as a pickle.

    header      int64 [2]: what follows, and the length of the pickle
    pickle      uint8 [length]: the value without its tensors, and their shapes, strides and dtypes
    tensors     one message; their bits, shapes and strides arrive unchanged

The receivers know none of the shapes beforehand. The pickle is from a rank of the same job: it comes through sockets
that nobody else can reach, or has the tag of `launch.message_seal`, which is checked first.
"""

import io
import pickle
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from patchpar.comm.collectives import Communicator
from patchpar.comm.transport import TensorSpec
from patchpar.errors import ExchangeError
from patchpar.plan.mesh import Axis

KIND = "encoders"
VALUE, WORKING = 1, 2
HEADER = TensorSpec((2,), torch.int64)


class TensorLayout(NamedTuple):
    """Size and strides of a tensor; of a dim of stride 0 one entry is sent."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, x: Tensor) -> "TensorLayout":
        """Return the layout of `x`, of any shape."""
        return cls(tuple(x.shape), x.stride(), x.dtype)

    @property
    def sent(self) -> TensorSpec:
        """What is sent of such a tensor."""
        sizes = zip(self.shape, self.strides, strict=True)
        return TensorSpec(tuple(min(size, 1) if stride == 0 else size for size, stride in sizes), self.dtype)

    def take(self, x: Tensor) -> Tensor:
        """Return what is sent of `x`, of any shape."""
        return x.detach()[tuple(slice(0, size) for size in self.sent.shape)].contiguous()

    def rebuild(self, received: Tensor) -> Tensor:
        """Return the tensor of this layout with the values of `received`, of any shape, what is sent of it."""
        if received.stride() == self.strides and tuple(received.shape) == self.shape:
            return received
        made = torch.empty_strided(received.shape, self.strides, dtype=self.dtype, device=received.device)
        return made.copy_(received).as_strided(self.shape, self.strides)


class _Pickler(pickle.Pickler):
    """Pickles a value; its tensors on `device` are collected in `tensors`, each once."""

    def __init__(self, stream: io.BytesIO, device: torch.device) -> None:
        super().__init__(stream, protocol=5)
        self.tensors: list[Tensor] = []
        self._device, self._numbers = device, dict[int, int]()

    def persistent_id(self, value: Any) -> int | None:
        """Return the number of a tensor that is sent as it is."""
        if type(value) is not Tensor or value.device.type != self._device.type or value.layout is not torch.strided:
            return None
        if id(value) not in self._numbers:
            self._numbers[id(value)] = len(self.tensors)
            self.tensors.append(value)
        return self._numbers[id(value)]


class Unpickler(pickle.Unpickler):
    """Reads what `_Pickler` has written, with `tensors`, of any shape, in their places."""

    def __init__(self, stream: io.BytesIO, tensors: Sequence[Tensor]) -> None:
        super().__init__(stream)
        self._tensors = tensors

    def persistent_load(self, number: int) -> Tensor:
        """Return the tensor of this number, of any shape."""
        return self._tensors[number]


class PackedValue(NamedTuple):
    """A value to be sent: a pickle, and tensors of any shape."""

    pickled: bytes
    tensors: tuple[Tensor, ...]

    @classmethod
    def of(cls, value: Any, device: torch.device) -> "PackedValue":
        """Pack a value whose tensors on `device` are sent as they are. Raises what pickle raises."""
        stream = io.BytesIO()
        pickler = _Pickler(stream, device)
        pickler.dump(value)
        layouts = [TensorLayout.of(x) for x in pickler.tensors]
        sent = tuple(layout.take(x) for layout, x in zip(layouts, pickler.tensors, strict=True))
        return cls(pickle.dumps((layouts, stream.getvalue()), protocol=5), sent)


class ValueTransfer:
    """Sends values from the first rank of `axis` to all others through `comm`."""

    def __init__(self, comm: Communicator, axis: Axis) -> None:
        self.comm, self.device = comm, comm.transport.device
        self._peers, self._first = [axis.ranks[other] for other in axis.others], axis.ranks[0]
        self._purpose = f"{KIND} {axis.ranks}"
        self._last_message = time.monotonic()

    def begin(self) -> None:
        """Begin to compute a value, for which the others wait from now on."""
        self._last_message = time.monotonic()

    def still_working(self, where: str) -> None:
        """Tell the others that the value is still being computed, often enough that their waits do not end."""
        if time.monotonic() - self._last_message > self.comm.transport.deadline / 4:
            self._send(where, torch.tensor([WORKING, 0]))

    def send(self, where: str, packed: PackedValue) -> None:
        """Send a value to all others. Raises ExchangeError."""
        seal = self.comm.seal
        message = packed.pickled if seal is None else seal.seal(self._purpose, packed.pickled)
        self._send(where, torch.tensor([VALUE, len(message)]))
        self._send(where, torch.frombuffer(bytearray(message), dtype=torch.uint8))
        if packed.tensors:
            self._send(where, *packed.tensors)

    def receive(self, where: str) -> Any:
        """Return the value that the first rank has sent. Raises ExchangeError, AuthenticationError."""
        status, length = WORKING, 0
        while status == WORKING:
            status, length = self._receive(where, HEADER)[0].tolist()
        if status != VALUE:
            raise ExchangeError(f"{where}: {status} is no message of an encoder: the ranks do not make the same calls")
        (data,) = self._receive(where, TensorSpec((length,), torch.uint8))
        message, seal = data.cpu().numpy().tobytes(), self.comm.seal
        layouts, pickled = pickle.loads(message if seal is None else seal.open(self._purpose, self._first, message))
        received = self._receive(where, *(layout.sent for layout in layouts)) if layouts else []
        tensors = [layout.rebuild(x) for layout, x in zip(layouts, received, strict=True)]
        return Unpickler(io.BytesIO(pickled), tensors).load()

    def _send(self, where: str, *tensors: Tensor) -> None:
        self.comm.send(KIND, where, self._peers, [x.to(self.device) for x in tensors]).wait()
        self._last_message = time.monotonic()

    def _receive(self, where: str, *specs: TensorSpec) -> list[Tensor]:
        return self.comm.receive(KIND, where, self._first, specs).wait()[0]
