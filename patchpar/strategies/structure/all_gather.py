"""Tensors of every rank to every rank."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from patchpar.comm.collectives import Communicator, ExchangePart
from patchpar.comm.transport import TensorSpec
from patchpar.plan.mesh import Axis
from patchpar.strategies.structure.work_schedule import Unit

UnitAssignment = Sequence[tuple[Unit, ...]]
Sent = Callable[[int], Sequence[Tensor]]
Expected = Callable[[int], Sequence[TensorSpec]]
PREDICTION, ANCHOR, MASK, LATENTS = "prediction", "anchor", "mask", "latents"


def from_everyone(
    mesh: tuple[Communicator, Axis],
    where: str,
    own: Mapping[str, Sent],
    expected: Mapping[str, Expected],
    *,
    silent: bool = False,
) -> list[dict[str, list[Tensor]]]:
    """Tensors by kind from every place, ours included, in one message to each rank.

    `own`: what a place gets of ours, `expected`: what form that has which we get of a place. What we keep is what our
    own place gets. `silent`: nothing is sent, and what others would have sent is 0. Raises ExchangeError.
    """
    comm, axis = mesh
    found: list[dict[str, list[Tensor]]] = [{kind: [] for kind in expected} for _ in range(axis.size)]
    found[axis.rank] = {kind: list(own[kind](axis.rank)) for kind in expected}
    if silent:
        for group_rank in axis.others:
            found[group_rank] = {kind: _zeros(specs(group_rank), comm) for kind, specs in expected.items()}
    elif axis.size > 1:
        parts = [_part(axis, kind, own[kind], specs) for kind, specs in expected.items()]
        parts = [part for part in parts if part.outgoing or part.incoming]
        for part, received in zip(parts, comm.exchange(where, parts).wait(), strict=True):
            for peer, tensors in received.items():
                found[axis.ranks.index(peer)][part.kind] = tensors
    return found


def to_all(tensors: Sequence[Tensor]) -> Sent:
    """The very same to every place, which then share one message."""
    whole = [x.contiguous() for x in tensors]
    return lambda _: whole


def _part(axis: Axis, kind: str, own: Sent, specs: Expected) -> ExchangePart:
    leaving = {axis.ranks[group_rank]: tuple(own(group_rank)) for group_rank in axis.others}
    incoming = {axis.ranks[group_rank]: tuple(specs(group_rank)) for group_rank in axis.others}
    outgoing = [((peer,), tensors) for peer, tensors in leaving.items() if tensors]
    return ExchangePart(kind, outgoing, {peer: found for peer, found in incoming.items() if found})


def _zeros(specs: Sequence[TensorSpec], comm: Communicator) -> list[Tensor]:
    return [torch.zeros(spec.shape, dtype=spec.dtype, device=comm.transport.device) for spec in specs]


def stacked(units: Sequence[Unit], predictions: Mapping[Unit, Tensor]) -> list[Tensor]:
    """Predictions of some units as one tensor to send, or as nothing."""
    return [torch.stack([predictions[unit] for unit in units])] if units else []


def stack_spec(units: Sequence[Unit], one: Tensor) -> list[TensorSpec]:
    """What `stacked` makes of predictions like `one`."""
    return [TensorSpec((len(units), *one.shape), one.dtype)] if units else []
