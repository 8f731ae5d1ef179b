"""Predictions of the denoiser on their way between the ranks of an axis, each with a stamp of its origin.

A stamp says which step and call a message belongs to and what shapes it has. Ranks that had parted, because something
made one of them take a step or a call more than the others, would otherwise use each other's values in the wrong place.
"""

import zlib
from collections.abc import Sequence
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
PLAIN = (bool, int, float, str, type(None))


@dataclass(frozen=True, slots=True)
class OutputForm:
    """What a denoiser call returns, with placeholders where the tensors are, and the specs of those tensors."""

    tree: Any
    specs: tuple[TensorSpec, ...]

    @classmethod
    def of(cls, output: Any) -> "OutputForm | None":
        """The form of an output; None if it holds more than tensors, numbers and strings."""
        if not all(isinstance(leaf, (Tensor, *PLAIN)) for leaf in leaves(output)):
            return None
        tensors = tensors_in(output)
        return cls(with_tensors(output, [torch.empty(0)] * len(tensors)), tuple(TensorSpec.of(x) for x in tensors))


@dataclass(frozen=True, slots=True)
class PredictionTime:
    """When in a run of the pipeline a prediction is made."""

    step: int
    call: int

    def __str__(self) -> str:
        return f"guidance, step {self.step}, call {self.call}"

    def stamp(self, specs: tuple[TensorSpec, ...], device: torch.device) -> Tensor:
        """The moment and the specs as numbers, the same on every rank."""
        shapes = [(tuple(spec.shape), str(spec.dtype)) for spec in specs]
        return torch.tensor([self.step, self.call, zlib.crc32(repr(shapes).encode())], device=device)


class PredictionExchange:
    """Sends this rank's predictions to the others of the axis and takes in theirs."""

    def __init__(self, comm: Communicator, axis: Axis) -> None:
        self._comm, self._axis = comm, axis
        self._sent: list[Work[Messages]] = []
        self._parcels: list[_ExpectedMessage] = []
        self._messages: list[AsyncMessage] = []
        self._doubts: list[Tensor] = []

    def exchange(self, output: Any, moment: PredictionTime) -> list[Any]:
        """Outputs of the same form from every place, in order, now. Raises ExchangeError."""
        form = OutputForm.of(output)
        if form is None:
            raise UnsupportedModel(
                f"{moment}: the denoiser's {type(output).__name__} holds more than tensors and numbers, which cannot "
                "be joined from shares of the batch: use cfg=1"
            )
        stamp = self._stamp(moment, form)
        own = [stamp, *(x.contiguous() for x in tensors_in(output))]
        specs = [TensorSpec.of(x) for x in own]
        received = AllGather(self._comm, self._axis, KIND, str(moment)).start(own, lambda _: specs).wait()
        for group_rank in self._axis.others:
            self.check(received[group_rank][0], stamp, moment, group_rank)
        return [with_tensors(output, tensors[1:]) for tensors in received]

    def shapes_of_all(self, own: Sequence[Tensor], moment: PredictionTime) -> list[tuple[tuple[int, ...], ...]]:
        """Of each of our tensors the shapes that it has at every place, in order, now. Raises ExchangeError."""
        own_sizes = torch.tensor([size for x in own for size in x.shape], device=self._comm.transport.device)
        of_all = [x.tolist() for x in AllGather(self._comm, self._axis, KIND, f"{moment}: shapes").same(own_sizes)]
        ends = list(accumulate(x.ndim for x in own))
        return [tuple(tuple(sizes[end - x.ndim : end]) for sizes in of_all) for x, end in zip(own, ends, strict=True)]

    def send(self, output: Any, form: OutputForm, moment: PredictionTime) -> None:
        """Start sending a prediction to all others. What is expected from earlier calls starts to come with it."""
        tensors = (self._stamp(moment, form), *(x.contiguous() for x in tensors_in(output)))
        peers = tuple(self._axis.ranks[group_rank] for group_rank in self._axis.others)
        self._sent.append(self._send_recv([Outgoing(peers, tensors)], moment))

    def expect(self, group_rank: int, form: OutputForm, moment: PredictionTime, *, at_once: bool) -> list[Tensor]:
        """Promises of the prediction that `group_rank` makes.

        Not `at_once` if this rank computes something first: a receive that waits on a GPU's stream would hold up what
        that computation exchanges on another axis.
        """
        parcel = _ExpectedMessage(self, group_rank, form, moment)
        self._parcels.append(parcel)
        if at_once:
            self.wait()
        self._messages.append(AsyncMessage(form.specs, self._comm.transport.device, parcel.fetch))
        return self._messages[-1].tensors

    def wait(self) -> None:
        """Start to receive everything that is expected."""
        if any(parcel.arriving is None for parcel in self._parcels):
            self._send_recv([], self._parcels[-1].moment)

    def settle(self) -> None:
        """Take in what nobody has used yet and let go of what has been sent. Raises ExchangeError."""
        try:
            for message in self._messages:
                message.wait()
            for arriving in self._sent:
                arriving.wait()
        finally:
            self._messages, self._parcels, self._sent = [], [], []

    def audit(self) -> None:
        """Look at the stamps that were left unread so as not to wait for a GPU. Raises ExchangeError."""
        doubts, self._doubts = self._doubts, []
        if doubts and bool(torch.stack(doubts).any()):
            raise ExchangeError(
                f"rank {self._axis.ranks[self._axis.rank]}: predictions of another step or call came in: the ranks of "
                f"axis '{self._axis.name}' had parted, and this result is wrong"
            )

    def check(self, stamp: Tensor, expected: Tensor, moment: PredictionTime, group_rank: int) -> None:
        """Compare the stamp of a message from `group_rank` with the one it should have, or keep that for `audit`."""
        if stamp.device.type != "cpu":
            self._doubts.append((stamp != expected).any())
        elif not torch.equal(stamp, expected):
            step, call, _ = stamp.tolist()
            raise ExchangeError(
                f"rank {self._axis.ranks[self._axis.rank]} is at {moment}, rank {self._axis.ranks[group_rank]} at step "
                f"{step}, call {call}, or their predictions differ in shape: the ranks of axis '{self._axis.name}' "
                "have parted"
            )

    def _stamp(self, moment: PredictionTime, form: OutputForm) -> Tensor:
        return moment.stamp(form.specs, self._comm.transport.device)

    def _send_recv(self, outgoing: list[Outgoing], moment: PredictionTime) -> Work[Messages]:
        due = [parcel for parcel in self._parcels if parcel.arriving is None]
        arriving = self._comm.send_recv(KIND, str(moment), outgoing, [parcel.incoming() for parcel in due])
        for index, parcel in enumerate(due):
            parcel.arriving, parcel.index = arriving, index
        return arriving


class _ExpectedMessage:
    """One message that another place sends us."""

    def __init__(self, post: PredictionExchange, group_rank: int, form: OutputForm, moment: PredictionTime) -> None:
        self.post, self.group_rank, self.form, self.moment = post, group_rank, form, moment
        self.arriving: Work[Messages] | None = None
        self.index = 0

    def incoming(self) -> Incoming:
        """What to receive: the stamp, then the tensors."""
        stamp = self.post._stamp(self.moment, self.form)
        return Incoming(self.post._axis.ranks[self.group_rank], (TensorSpec.of(stamp), *self.form.specs))

    def fetch(self) -> list[Tensor]:
        """Wait for it."""
        if self.arriving is None:
            self.post.wait()
        assert self.arriving is not None
        stamp, *tensors = self.arriving.wait_for(self.index)
        self.post.check(stamp, self.post._stamp(self.moment, self.form), self.moment, self.group_rank)
        return tensors
