"""Exchange of the denoiser's predictions between the ranks of an axis, each with a stamp of its origin.

A stamp holds the step, the call and a hash of the shapes of a message. Without it, ranks that are out of step, because
one of them made a step or a call more than the others, would use values of another step or call.
"""

import zlib
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from patchpar.comm.async_tensor import AsyncMessage
from patchpar.comm.collectives import AllGather, Communicator
from patchpar.comm.pytree import leaves, tensors_in, with_tensors
from patchpar.comm.transport import Incoming, Messages, Outgoing, TensorSpec, Work
from patchpar.errors import ExchangeError, UnsupportedModel
from patchpar.plan.mesh import Axis

KIND = "guidance"
STAMP = TensorSpec((3,), torch.int64)
HASH_BITS, CALL_BITS = 32, 12
CALLS, STEPS = 1 << CALL_BITS, 1 << (63 - HASH_BITS - CALL_BITS)
"""Calls of one step, and steps, that a stamp tells apart."""
PLAIN = (bool, int, float, str, type(None))


@dataclass(frozen=True, slots=True)
class OutputForm:
    """The structure of a denoiser's output, with placeholders for its tensors, and the specs of those tensors."""

    tree: Any
    specs: tuple[TensorSpec, ...]

    @classmethod
    def of(cls, output: Any) -> "OutputForm | None":
        """Return the form of an output; None if it holds more than tensors, numbers and strings."""
        if not all(isinstance(leaf, (Tensor, *PLAIN)) for leaf in leaves(output)):
            return None
        tensors = tensors_in(output)
        return cls(with_tensors(output, [torch.empty(0)] * len(tensors)), tuple(TensorSpec.of(x) for x in tensors))


@dataclass(frozen=True, slots=True)
class PredictionTime:
    """The step and the denoiser call within it that make a prediction."""

    step: int
    call: int

    def __str__(self) -> str:
        return f"guidance, step {self.step}, call {self.call}"

    def stamp(self, specs: tuple[TensorSpec, ...], device: torch.device) -> Tensor:
        """Return step, call and a hash of the specs, the same on every rank, as one number three times: int64, [3].

        A GPU fills in one number by itself; several would have to be copied to it, for which the process waits.
        """
        shapes = [(tuple(spec.shape), str(spec.dtype)) for spec in specs]
        number = zlib.crc32(repr(shapes).encode()) | (self.call % CALLS) << HASH_BITS
        return torch.full(STAMP.shape, number | (self.step % STEPS) << (HASH_BITS + CALL_BITS), device=device)

    @classmethod
    def of(cls, stamp: Tensor) -> "PredictionTime":
        """Return what a stamp [3] says of step and call. Waits for a GPU."""
        number = int(stamp[0])
        return cls(number >> (HASH_BITS + CALL_BITS), (number >> HASH_BITS) % CALLS)


class PredictionExchange:
    """Sends this rank's predictions to the other ranks of the axis and receives theirs.

    `catch_up` is called before messages of other ranks are received, which may wait for this one; `not_made` returns
    the numbers of calls that they have not made for that reason. A call that is made is sent and received before
    the ranks do anything else together, since messages between two ranks arrive in the order in which they are sent.
    """

    def __init__(
        self,
        comm: Communicator,
        axis: Axis,
        catch_up: Callable[[], object] = bool,
        not_made: Callable[[], Container[int]] = tuple,
    ) -> None:
        self._comm, self._axis, self._catch_up, self._not_made = comm, axis, catch_up, not_made
        self._sent: list[Work[Messages]] = []
        self._parcels: list[_ExpectedMessage] = []
        self._messages: list[AsyncMessage] = []
        self._deferred: list[Tensor] = []

    def exchange(self, output: Any, when: PredictionTime) -> list[Any]:
        """All-gather outputs of the same form: return them by group rank. Raises ExchangeError, UnsupportedModel."""
        form = OutputForm.of(output)
        if form is None:
            raise UnsupportedModel(
                f"{when}: the denoiser's {type(output).__name__} holds more than tensors and numbers, which cannot "
                "be joined from parts of the batch: use cfg=1"
            )
        stamp = self._stamp(when, form)
        own = [stamp, *(x.contiguous() for x in tensors_in(output))]
        specs = [TensorSpec.of(x) for x in own]
        received = AllGather(self._comm, self._axis, KIND, str(when)).start(own, lambda _: specs).wait()
        for group_rank in self._axis.others:
            self.check(received[group_rank][0], stamp, when, group_rank)
        return [with_tensors(output, tensors[1:]) for tensors in received]

    def shapes_of_all(self, own: Sequence[Tensor], when: PredictionTime) -> list[tuple[tuple[int, ...], ...]]:
        """Return the shapes of each of our tensors, of any shape, on all ranks, by group rank. Raises ExchangeError."""
        own_sizes = torch.tensor([size for x in own for size in x.shape], device=self._comm.transport.device)
        of_all = [x.tolist() for x in AllGather(self._comm, self._axis, KIND, f"{when}: shapes").same(own_sizes)]
        ends = list(accumulate(x.ndim for x in own))
        return [tuple(tuple(sizes[end - x.ndim : end]) for sizes in of_all) for x, end in zip(own, ends, strict=True)]

    def send(self, output: Any, form: OutputForm, when: PredictionTime) -> None:
        """Start to send a prediction to all others, and to receive the messages expected from calls that are made."""
        tensors = (self._stamp(when, form), *(x.contiguous() for x in tensors_in(output)))
        peers = tuple(self._axis.ranks[group_rank] for group_rank in self._axis.others)
        self._sent.append(self._send_recv([Outgoing(peers, tensors)], when))

    def expect(
        self, group_rank: int, form: OutputForm, when: PredictionTime, *, at_once: bool, number: int = 0
    ) -> list[Tensor]:
        """Return async tensors of any shape, that of `form`, for the prediction that `group_rank` makes in a call.

        `number`: of the call, see `not_made`. `at_once`: post the receive now. Not if this rank computes something
        first: a receive that waits on a GPU's stream would delay the exchange of that computation on another axis.
        """
        parcel = _ExpectedMessage(self, group_rank, form, when, number)
        self._parcels.append(parcel)
        if at_once:
            self.receive_made()
        self._messages.append(AsyncMessage(form.specs, self._comm.transport.device, parcel.fetch))
        return self._messages[-1].tensors

    def wait(self) -> None:
        """Start to receive all expected messages."""
        if any(parcel.arriving is None for parcel in self._parcels):
            self._catch_up()
            self.receive_made()

    def receive_made(self) -> None:
        """Start to receive the expected messages of calls that are made."""
        if due := self._due():
            self._send_recv([], due[-1].when)

    def settle(self) -> None:
        """Wait for all messages that are sent or expected. Raises ExchangeError."""
        try:
            for message in self._messages:
                message.wait()
            for arriving in self._sent:
                arriving.wait()
        finally:
            self._messages, self._parcels, self._sent = [], [], []

    def begin(self) -> None:
        """Begin a pipeline call: wait as `settle`, and forget stamps of one that has failed. Raises ExchangeError."""
        try:
            self.settle()
        finally:
            self._deferred.clear()

    def audit(self) -> None:
        """Check the stamps of tensors on a GPU, which `check` has deferred. Raises ExchangeError."""
        deferred, self._deferred = self._deferred, []
        if deferred and bool(torch.stack(deferred).any()):
            raise ExchangeError(
                f"rank {self._axis.ranks[self._axis.rank]}: received predictions of another step or call: the ranks of "
                f"axis '{self._axis.name}' are out of step, and this result is wrong: run the call again"
            )

    def check(self, stamp: Tensor, expected: Tensor, when: PredictionTime, group_rank: int) -> None:
        """Compare the stamp [3] of a message from `group_rank` with the `expected` one, on a GPU later in `audit`.

        Raises ExchangeError if they differ.
        """
        if stamp.is_meta:  # no values, in a dry run
            return
        if stamp.device.type != "cpu":
            self._deferred.append((stamp != expected).any())
        elif not torch.equal(stamp, expected):
            theirs = PredictionTime.of(stamp)
            raise ExchangeError(
                f"rank {self._axis.ranks[self._axis.rank]} is at {when}, rank {self._axis.ranks[group_rank]} at step "
                f"{theirs.step}, call {theirs.call}, or their predictions differ in shape: the ranks of axis "
                f"'{self._axis.name}' are out of step: make the same calls on all of them"
            )

    def _stamp(self, when: PredictionTime, form: OutputForm) -> Tensor:
        return when.stamp(form.specs, self._comm.transport.device)

    def _send_recv(self, outgoing: list[Outgoing], when: PredictionTime) -> Work[Messages]:
        due = self._due()
        arriving = self._comm.send_recv(KIND, str(when), outgoing, [parcel.incoming() for parcel in due])
        for index, parcel in enumerate(due):
            parcel.arriving, parcel.index = arriving, index
        return arriving

    def _due(self) -> list["_ExpectedMessage"]:
        not_made = self._not_made()
        return [each for each in self._parcels if each.arriving is None and each.number not in not_made]


class _ExpectedMessage:
    """One message that another rank sends to this one, when it has made call `number`."""

    def __init__(
        self, post: PredictionExchange, group_rank: int, form: OutputForm, when: PredictionTime, number: int
    ) -> None:
        self.post, self.group_rank, self.form, self.when, self.number = post, group_rank, form, when, number
        self.arriving: Work[Messages] | None = None
        self.index = 0

    def incoming(self) -> Incoming:
        """Return the specs to receive: of the stamp, then of the tensors."""
        return Incoming(self.post._axis.ranks[self.group_rank], (STAMP, *self.form.specs))

    def fetch(self) -> list[Tensor]:
        """Wait for the message and return its tensors, of any shape. Raises ExchangeError."""
        if self.arriving is None:
            self.post.wait()
        assert self.arriving is not None
        stamp, *tensors = self.arriving.wait_for(self.index)
        self.post.check(stamp, self.post._stamp(self.when, self.form), self.when, self.group_rank)
        return tensors
