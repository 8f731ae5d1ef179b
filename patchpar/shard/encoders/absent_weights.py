"""Weights that a rank does not hold: they keep their place in the network, with shape, dtype and device, but no memory.

take_out        the memory of the weights is freed; any use of a value raises UnsupportedModel
give_back       the first rank of the axis, which holds them, sends them to the others
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from patchpar.comm.collectives import Communicator
from patchpar.comm.transport import Incoming, Outgoing, TensorSpec
from patchpar.errors import UnsupportedModel
from patchpar.plan.mesh import Axis

KIND = "encoders"
CHUNK_BYTES = 64 * 2**20
"""Of a weight, sent at a time: the receivers confirm each, so that a sender keeps no copy of the whole network."""


class AbsentWeight(Tensor):
    """A weight of the network `owner` that is on another rank: shape, dtype and device without values."""

    owner: str

    @staticmethod
    def __new__(cls, like: Tensor, device: torch.device, owner: str) -> "AbsentWeight":
        """Return a stand-in for `like`, of any shape, as if it were on `device`."""
        make: Any = Tensor._make_wrapper_subclass
        made: AbsentWeight = make(cls, like.shape, strides=like.stride(), dtype=like.dtype, device=device)
        made.owner = owner
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # as torch calls it
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Raise UnsupportedModel for everything that needs values."""
        absent = next(each for each in _flat((*args, *(kwargs or {}).values())) if isinstance(each, AbsentWeight))
        if func is torch.ops.aten.detach.default:
            return cls(absent, absent.device, absent.owner)
        raise UnsupportedModel(
            f"the weights of {absent.owner} are on the first rank of an image only (encoders=one), but {func.name()} "
            "needs their values on another rank: use encoders=all"
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # torch's own needs values
        return f"AbsentWeight(of {self.owner}, shape={tuple(self.shape)}, dtype={self.dtype}, device='{self.device}')"


class AbsentNetworks(Protocol):
    """The weights of networks, which a rank does not hold from `take_out` to `give_back`."""

    def take_out(self, device: torch.device) -> None:
        """Free the memory of the weights, which from now on seem to be on `device`."""

    def give_back(self, comm: Communicator, axis: Axis) -> None:
        """Let all ranks of the axis hold the weights. Collective. Raises ExchangeError."""


class AbsentWeights:
    """The weights of `networks`, by name, which this rank does not hold from `take_out` to `give_back`.

    Weights that one of `others` has too stay. Every rank makes one, since they agree on what is sent. Raises
    UnsupportedModel for weights that are no plain tensors.
    """

    def __init__(self, networks: Mapping[str, nn.Module], others: Iterable[nn.Module]) -> None:
        shared = {id(weight) for network in others for weight in network.parameters()}
        self._owners: dict[int, list[tuple[nn.Module, str]]] = {}
        self._weights: dict[int, tuple[str, nn.Parameter]] = {}
        for owner, network in networks.items():
            for module, name, weight in weights_of(network):
                if id(weight) in shared:
                    continue
                _refuse_other_than_plain(owner, weight)
                self._weights.setdefault(id(weight), (owner, weight))
                self._owners.setdefault(id(weight), []).append((module, name))
        self._layouts = {key: (TensorSpec.of(weight), weight.stride()) for key, (_, weight) in self._weights.items()}

    def take_out(self, device: torch.device) -> None:
        """Free the memory of the weights, which from now on seem to be on `device`."""
        for key, (owner, weight) in self._weights.items():
            absent = nn.Parameter(AbsentWeight(weight, device, owner), requires_grad=weight.requires_grad)
            for module, name in self._owners[key]:
                module._parameters[name] = absent
            weight.data = torch.empty(0, dtype=weight.dtype, device=weight.device)

    def give_back(self, comm: Communicator, axis: Axis) -> None:
        """Let all ranks of the axis hold the weights. Collective. Raises ExchangeError."""
        for key, (owner, weight) in self._weights.items():
            where = f"weights of {owner}"
            if axis.rank == 0:
                _send(comm, axis, where, weight)
                continue
            with torch.inference_mode(mode=False):  # whose tensors autograd refuses for good
                weight.data = _received(comm, axis, where, *self._layouts[key])
            for module, name in self._owners[key]:
                module._parameters[name] = weight


def weights_of(network: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    """Yield every module of a network with the names of its own weights; a tied weight several times."""
    for module in network.modules():
        for name, weight in module._parameters.items():
            if weight is not None:
                yield module, name, weight


def _refuse_other_than_plain(owner: str, weight: nn.Parameter) -> None:
    kind = type(weight.data) if type(weight) is nn.Parameter else type(weight)
    if kind is not Tensor or weight.layout is not torch.strided or weight.is_meta:
        what = "a meta tensor" if weight.is_meta else kind.__name__
        raise UnsupportedModel(
            f"{owner} has a weight that is {what}, and encoders=one sends plain tensors only (none that are quantised "
            "or not loaded): use encoders=all"
        )


def _send(comm: Communicator, axis: Axis, where: str, weight: Tensor) -> None:
    """Send a weight, of any shape, in chunks to all others of the axis."""
    peers = tuple(axis.ranks[other] for other in axis.others)
    confirmed = [Incoming(peer, (TensorSpec((1,), torch.uint8),)) for peer in peers]
    for chunk in _chunks(weight.detach().contiguous().view(-1)):
        comm.send_recv(KIND, where, [Outgoing(peers, (chunk,))], confirmed).wait()


def _received(comm: Communicator, axis: Axis, where: str, spec: TensorSpec, strides: tuple[int, ...]) -> Tensor:
    """Return a weight of these strides on the transport's device, from the first rank of the axis."""
    device, first = comm.transport.device, axis.ranks[0]
    flat = torch.empty(math.prod(spec.shape), dtype=spec.dtype, device=device)
    for chunk in _chunks(flat):
        comm.send_recv(KIND, where, [], [Incoming(first, (TensorSpec.of(chunk),), (chunk,))]).wait()
        comm.send(KIND, where, [first], [torch.ones(1, dtype=torch.uint8, device=device)]).wait()
    whole = flat.view(spec.shape)
    if whole.stride() == strides:
        return whole
    return torch.empty_strided(spec.shape, strides, dtype=spec.dtype, device=device).copy_(whole)


def _chunks(flat: Tensor) -> tuple[Tensor, ...]:
    """Return views of a buffer [elements], of at most CHUNK_BYTES each."""
    return torch.split(flat, max(1, CHUNK_BYTES // flat.element_size())) if flat.numel() else ()


def _flat(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from _flat(value)
        else:
            yield value
