"""Weights of a plan that are sharded or hosted: from loading on, or from the first call of a network on."""

import logging
from collections.abc import Callable, Mapping
from copy import deepcopy
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from patchpar.comm.collectives import Communicator
from patchpar.comm.pytree import map_leaves
from patchpar.errors import ExchangeError, PlanError, UnsupportedModel
from patchpar.pipeline.divided_features import DividedFeatures, move
from patchpar.pipeline.divided_networks import bytes_of_part, log_whole, refuse_divided, store_for, text_encoders_of
from patchpar.plan.mesh import Axis, Mesh
from patchpar.plan.plan import Plan
from patchpar.shard.compiled import uncompiled
from patchpar.shard.hooks import HookSet
from patchpar.shard.step_caches import caches_set_aside
from patchpar.shard.tensor.denoiser import TensorDenoiser
from patchpar.shard.weights.host_segment import all_can_map
from patchpar.shard.weights.host_store import refuse_without_host_memory
from patchpar.shard.weights.outside_reads import keep_what_is_read_outside
from patchpar.shard.weights.packed import copy_memory
from patchpar.shard.weights.restored import restore_all
from patchpar.shard.weights.rounds import GatherRounds
from patchpar.shard.weights.sharded import ShardedWeights
from patchpar.shard.weights.stores import BlockStore, moved_by_all
from patchpar.strategies.cfg.split import GuidanceSplit

log = logging.getLogger(__name__)


def ranks_of_plain_call(plan: Plan, mesh: Mesh, weights: "InstalledWeights | None") -> Axis:
    """Return all ranks that a plain call of a denoiser takes, which gather its weights or add up its features."""
    if weights is not None and weights.is_collective:
        return mesh.of_one_image()
    return mesh.of_one_branch() if plan.tensor > 1 else mesh["patch"]


def plain_calls_take_one_rank(plan: Plan, weights: "InstalledWeights | None") -> bool:
    """Whether a rank can make a plain call of a denoiser alone, as one does that has just been started anew."""
    return plan.tensor == 1 and (weights is None or not weights.is_collective)


class InstalledWeights:
    """Denoisers and text encoders, in shards over all ranks of an image.

    `guidance`: what splits the calls of the denoisers. `held`: networks that are in shards already; None for one that
    stays whole. Raises PlanError for stages whose ranks cannot map each other's memory, and ExchangeError.
    """

    def __init__(
        self,
        pipe: Any,
        plan: Plan,
        mesh: Mesh,
        comm: Communicator,
        guidance: GuidanceSplit | None,
        held: Mapping[nn.Module, ShardedWeights | None] = MappingProxyType({}),
    ) -> None:
        self._plan, self._axis, self._comm, self._guidance = plan, mesh.of_one_image(), comm, guidance
        self._same_features = mesh.of_same_features()
        self.is_collective = plan.weights != "hosted" or not all_can_map((comm, self._axis))
        """Whether all ranks of an image have to run the same blocks in the same order."""
        if plan.weights == "hosted" and self.is_collective and self._axis.rank == 0:
            log.warning("the ranks cannot map each other's host memory, so that they send their parts of weights")
        if plan.stage > 1 and self.is_collective:
            raise PlanError(
                f"plan {plan} takes the blocks of each stage from host memory, but not every rank can map that of the "
                "others: use ranks of one host, or patch=N,weights=sharded"
            )
        if guidance is not None and self.is_collective:
            guidance.rounds = GatherRounds(comm, self._axis, mesh["cfg"])
        self._sharded: dict[nn.Module, ShardedWeights | None] = {}  # None: stays whole
        self._held = dict(held)  # until their first call
        self._hooks = HookSet()
        for weights in filter(None, self._held.values()):
            self._join(weights)
        for name, network in text_encoders_of(pipe).items():
            self._hooks.before(network, partial(self._before_encoder, name), with_kwargs=True)

    def before_denoiser(
        self, network: nn.Module, plain: Callable[..., Any], call: tuple[Any, Any]
    ) -> ShardedWeights | None:
        """Shard a denoiser before its first call, and return its weights; `plain` is its own forward.

        Raises UnsupportedModel, ExchangeError.
        """
        if network not in self._sharded:
            self._catch_up()
            self._sharded[network] = self._shard(network, plain, call)
        if self._guidance is not None and self._guidance.rounds is not None:
            self._guidance.rounds.weights = self._sharded[network]
        return self._sharded[network]

    def divide_features(self, tensor: TensorDenoiser, plain: Callable[..., Any], call: tuple[Any, Any]) -> None:
        """Cut a denoiser to this rank's features, and shard these, before such a call, unless it is done. Collective.

        Raises UnsupportedModel, VerificationError, ExchangeError; PlanError where whole weights are needed and do not
        fit.
        """
        if tensor.resume(call):
            return
        self._catch_up()
        network = tensor.denoiser
        held = self._held.get(network)
        if held is not None:
            self._keep_what_is_read_outside(held, plain, call)
            del self._held[network]
        divide, blocks = partial(self._features_of, network, plain, call), tensor.weights
        if held is None and isinstance(blocks, DividedFeatures):
            blocks.divide = divide
        else:
            tensor.weights = blocks = DividedFeatures(held, divide)
        try:
            tensor.prepare(plain, call)
        except BaseException:
            if blocks.held is not None:  # not divided by features yet: it stays in shards
                self._held[network] = blocks.held
            raise
        self._sharded[network] = blocks.weights

    def _features_of(self, network: nn.Module, plain: Callable[..., Any], call: tuple[Any, Any]) -> ShardedWeights:
        device = self._comm.transport.device
        try:
            with torch.inference_mode(mode=False):
                store = self._store(network, self._same_features, on_the_host=True)
                with moved_by_all((self._comm, self._axis)):
                    found = ShardedWeights(network, store, resident=self._plan.resident, copy=copy_memory)
                found.times_whole = self._axis.size // self._same_features.size
                self._join(found)
        finally:  # also where it is refused
            move(network, device)
        try:
            self._keep_what_is_read_outside(found, plain, call)
        except PlanError:  # of all ranks
            found.restore()
            raise
        return found

    def _catch_up(self) -> None:
        if self._guidance is not None:
            self._guidance.catch_up()

    def _before_encoder(self, name: str, network: nn.Module, args: Any, kwargs: Any) -> None:
        """Called before a text encoder runs. One that cannot be sharded stays whole, which is logged."""
        self._catch_up()
        if network in self._sharded:
            return
        self._sharded[network] = None  # while it is called for a check
        try:
            self._sharded[network] = self._shard(network, network.forward, (args, kwargs))
        except UnsupportedModel as error:  # the same on all ranks
            log_whole(name, self._axis, error)
        except BaseException:
            del self._sharded[network]
            raise

    def _shard(self, network: nn.Module, plain: Callable[..., Any], call: tuple[Any, Any]) -> ShardedWeights | None:
        found = self._held[network] if network in self._held else self._new(network)
        self._held[network] = found  # until its first call, which may fail
        if found is not None:
            self._keep_what_is_read_outside(found, plain, call)
        del self._held[network]
        return found

    def _keep_what_is_read_outside(
        self, weights: ShardedWeights, plain: Callable[..., Any], call: tuple[Any, Any]
    ) -> None:
        def run() -> Any:
            args, kwargs = map_leaves(_copied, call)
            return plain(*args, **kwargs)

        with caches_set_aside(weights.network), uncompiled(weights.network):  # graphs of these shapes may be for this
            keep_what_is_read_outside(weights, run, self._axis)

    def _new(self, network: nn.Module) -> ShardedWeights:
        refuse_divided(network)
        with torch.inference_mode(mode=False):  # slots are written to in calls without it too
            store = self._store(network, self._axis, on_the_host=False)
            with moved_by_all((self._comm, self._axis)):
                found = ShardedWeights(network, store, resident=self._plan.resident)
            self._join(found)
        return found

    def _store(self, network: nn.Module, axis: Axis, *, on_the_host: bool) -> BlockStore:
        """Return where this rank's part of a network goes. Collective of the ranks of an image. Raises PlanError."""
        device = self._comm.transport.device
        if self._plan.weights == "hosted" and device.type != "meta":
            need = bytes_of_part(network, self._plan, axis, device, on_the_host=on_the_host)
            refuse_without_host_memory(need, (self._comm, self._axis))
        return store_for(self._plan, axis, device)

    def _join(self, weights: ShardedWeights) -> None:
        weights.join(self._comm)
        if weights.is_collective and not self.is_collective:  # the same on all ranks
            raise ExchangeError(
                f"the host memory with weights of {type(weights.network).__name__} cannot be mapped by all ranks, "
                "although a first page could: use weights=sharded"
            )

    def begin(self) -> None:
        """Begin a call of the pipeline, also after one that has failed. Raises UnsupportedModel, ExchangeError."""
        self.finish()
        self._refuse_replaced()

    def finish(self) -> None:
        """End a call of the pipeline: wait for gathers that were started in advance. Raises ExchangeError."""
        for weights in filter(None, self._sharded.values()):
            weights.settle()

    def gather(self) -> None:
        """Make all weights whole, since they may be changed or read now; the next call shards them again. Collective.

        Raises PlanError, with nothing changed, where they do not fit a device together. Raises ExchangeError.
        """
        restore_all(filter(None, (*self._sharded.values(), *self._held.values())))
        self._sharded.clear()
        self._held.clear()

    def _refuse_replaced(self) -> None:
        """Raise UnsupportedModel if a method has replaced weights while they were sharded: their values are lost."""
        for network, weights in (*self._sharded.items(), *self._held.items()):
            replaced = [] if weights is None else weights.replaced()
            if replaced:
                raise UnsupportedModel(
                    f"a method has replaced weights of {', '.join(replaced)} of {type(network).__name__} while these "
                    "were sharded, so that their values are lost: load the model again, and call the method before the "
                    "first image, or use weights=whole"
                )

    def end(self) -> dict[nn.Module, ShardedWeights | None]:
        """Remove the hooks; return the networks in shards, which stay so. Raises ExchangeError."""
        self.finish()
        self._hooks.close()
        every = {**self._sharded, **self._held}
        return {network: weights for network, weights in every.items() if weights is None or weights.in_slots}


def _copied(leaf: Any) -> Any:
    """Return a copy of an argument: a network may write into tensors and caches that it is given."""
    return leaf.clone() if isinstance(leaf, Tensor) else deepcopy(leaf)
