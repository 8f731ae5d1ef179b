"""Weights of a plan with weights=sharded: each network is sharded when it is first called, until `restore`."""

import logging
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from patchpar.comm.collectives import Communicator
from patchpar.comm.pytree import map_leaves
from patchpar.errors import UnsupportedModel
from patchpar.plan.mesh import Mesh
from patchpar.plan.plan import Plan
from patchpar.shard.hooks import HookSet
from patchpar.shard.step_caches import caches_set_aside
from patchpar.shard.weights.rounds import GatherRounds
from patchpar.shard.weights.sharded import ShardedWeights
from patchpar.strategies.cfg.split import GuidanceSplit

ENCODER = "text_encoder"  # what the names of text encoders begin with
NEED_NO_VALUES = frozenset(
    {
        *(
            "load_lora_weights",
            "unload_lora_weights",
            "load_lora_adapter",
            "unload_lora",
            "set_adapters",
            "set_adapter",
        ),
        *("delete_adapters", "enable_lora", "disable_lora", "enable_adapters", "disable_adapters"),
        *("set_progress_bar_config", "enable_lora_hotswap"),
    }
)
"""Methods that put modules beside weights or take them away, and read and change no weight, by their last name."""
log = logging.getLogger(__name__)


def needs_no_values(method: str) -> bool:
    """Return whether a method of a pipeline, or "transformer.method" of a network, leaves weights as they are."""
    return method.rpartition(".")[2] in NEED_NO_VALUES


class InstalledWeights:
    """Denoisers and text encoders, sharded over all ranks of an image. `guidance`: what splits its denoiser calls."""

    def __init__(self, pipe: Any, plan: Plan, mesh: Mesh, comm: Communicator, guidance: GuidanceSplit | None) -> None:
        self._plan, self._axis, self._comm, self._guidance = plan, mesh.of_one_image(), comm, guidance
        if guidance is not None:
            guidance.rounds = GatherRounds(comm, self._axis)
        self._sharded: dict[nn.Module, ShardedWeights | None] = {}  # None: stays whole
        self._hooks = HookSet()
        for name, network in pipe.components.items():
            if name.startswith(ENCODER) and isinstance(network, nn.Module):
                self._hooks.before(network, partial(self._before_encoder, name), with_kwargs=True)

    def before_denoiser(self, network: nn.Module, plain: Callable[..., Any], call: tuple[Any, Any]) -> None:
        """Shard a denoiser before its first call; `plain` is its own forward. Raises UnsupportedModel."""
        if network not in self._sharded:
            self._catch_up()
            self._sharded[network] = self._shard(network, plain, call)
        if self._guidance is not None and self._guidance.rounds is not None:
            self._guidance.rounds.weights = self._sharded[network]

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
            if self._axis.rank == 0:
                log.warning("%s stays whole on every rank: %s", name, error)

    def _shard(self, network: nn.Module, plain: Callable[..., Any], call: tuple[Any, Any]) -> ShardedWeights:
        with torch.inference_mode(mode=False):  # slots are written to in calls without it too
            found = ShardedWeights(network, self._comm, self._axis, resident=self._plan.resident)

        def run() -> Any:
            args, kwargs = map_leaves(_copied, call)
            return plain(*args, **kwargs)

        with caches_set_aside(network):
            found.keep_what_is_read_outside(run)
        return found

    def finish(self) -> None:
        """End a call of the pipeline: wait for gathers that were started in advance. Raises ExchangeError."""
        for weights in filter(None, self._sharded.values()):
            weights.settle()

    def gather(self) -> None:
        """Make all weights whole, since they may be changed or read now; the next call shards them again. Collective.

        Raises ExchangeError.
        """
        for weights in filter(None, self._sharded.values()):
            weights.restore()
        self._sharded.clear()

    def refuse_replaced(self) -> None:
        """Raise UnsupportedModel if a method has replaced weights while they were sharded: their values are lost."""
        for network, weights in self._sharded.items():
            replaced = [] if weights is None else weights.replaced()
            if replaced:
                raise UnsupportedModel(
                    f"a method has replaced weights of {', '.join(replaced)} of {type(network).__name__} while these "
                    "were sharded, so that their values are lost: load the model again, and call the method before the "
                    "first image, or use weights=whole"
                )

    def restore(self) -> None:
        """Make all weights whole and remove the hooks. Collective. Raises ExchangeError."""
        self._hooks.close()
        self.gather()


def _copied(leaf: Any) -> Any:
    """Return a copy of an argument: a network may write into tensors and caches that it is given."""
    return leaf.clone() if isinstance(leaf, Tensor) else deepcopy(leaf)
