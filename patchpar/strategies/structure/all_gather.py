"""All-gather of tensors whose content may differ by receiver."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from patchpar.comm.collectives import AxisComm, Communicator
from patchpar.comm.exchange_part import ExchangePart
from patchpar.comm.transport import TensorSpec
from patchpar.plan.mesh import Axis
from patchpar.strategies.structure.work_schedule import Unit

UnitAssignment = Sequence[tuple[Unit, ...]]
Sent = Callable[[int], Sequence[Tensor]]
Expected = Callable[[int], Sequence[TensorSpec]]
PREDICTION, ANCHOR, MASK, LATENTS = "prediction", "anchor", "mask", "latents"


def all_to_all(
    mesh: AxisComm, where: str, own: Mapping[str, Sent], expected: Mapping[str, Expected], *, silent: bool = False
) -> list[dict[str, list[Tensor]]]:
    """Return tensors of any shape by kind from every group rank, this one included, in one message to each rank.

    `own(group_rank)`: the tensors that this rank sends there; `expected(group_rank)`: the specs of those received from
    there. `silent`: nothing is sent, and the tensors of others are 0. Raises ExchangeError.
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
    """Return a sender of the same tensors, of any shape, to every group rank, in one message."""
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
    """Return the predictions [B, C, h, w] of `units` stacked to [len(units), B, C, h, w], or nothing without units."""
    return [torch.stack([predictions[unit] for unit in units])] if units else []


def stack_spec(units: Sequence[Unit], one: Tensor) -> list[TensorSpec]:
    """Return the spec of `stacked` for predictions like `one`, [B, C, h, w]."""
    return [TensorSpec((len(units), *one.shape), one.dtype)] if units else []
