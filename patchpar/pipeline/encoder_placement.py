"""Which ranks hold the pipeline's encoders: all of them, or with `encoders=one` the first rank of each image."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from patchpar.comm.collectives import Communicator
from patchpar.errors import UnsupportedModel
from patchpar.models.encoders import encoders_of
from patchpar.models.info import networks_of
from patchpar.plan.mesh import Axis
from patchpar.plan.plan import Plan
from patchpar.shard.encoders.one_rank import OneRankEncoders, WaysOfEncoders

OF_OTHER_PARTS = ("set_progress_bar_config", "enable_vae_", "disable_vae_")
"""Methods of pipelines that use no encoder, by name or its beginning."""


class EncoderPlacement:
    """The encoders of one rank's pipeline, on all ranks at first. `connect`, `ways`: see OneRankEncoders."""

    def __init__(
        self,
        rank: int,
        device: torch.device,
        connect: Callable[[], Communicator],
        ways: WaysOfEncoders | None = None,
    ) -> None:
        self._rank, self._device, self._connect, self._ways = rank, device, connect, ways
        self._one: OneRankEncoders | None = None
        self._names: frozenset[str] = frozenset()

    def arrange(self, pipe: Any, plan: Plan | None, ranks: Sequence[int] | None = None) -> None:
        """Hold the encoders of `pipe` where `plan` on `ranks` wants them. Collective.

        Raises UnsupportedModel, ExchangeError.
        """
        axis = self._axis_of(plan, ranks)
        if axis == self.axis:
            return
        self.give_back()
        if axis is None:
            return
        encoders = encoders_of(pipe)
        if not encoders:
            raise UnsupportedModel(f"{type(pipe).__name__} has no encoder that could be on one rank: use encoders=all")
        others = [each for name, each in networks_of(pipe).items() if name not in encoders]
        self._one = OneRankEncoders(encoders, others, axis, self._device, self._connect, self._ways)
        self._names = frozenset(encoders)

    @property
    def axis(self) -> Axis | None:
        """The ranks of one image, of which only the first holds the encoders; None if all do."""
        return None if self._one is None else self._one.axis

    def give_back(self) -> None:
        """Let all ranks hold the encoders. Collective. Raises ExchangeError."""
        one, self._one = self._one, None
        if one is not None:
            one.give_back()

    def give_back_for(self, method: str) -> None:
        """Let all ranks hold the encoders if this method of the pipeline, or of a network, may use them."""
        owner, _, name = method.rpartition(".")
        concerns = owner.partition(".")[0] in self._names if owner else not name.startswith(OF_OTHER_PARTS)
        if concerns:
            self.give_back()

    def control(self, exchange: str) -> None:
        """Set the transfer to "off", which gives other ranks encodings of zeros, for negative controls."""
        if self._one is not None:
            self._one.exchange = exchange

    def _axis_of(self, plan: Plan | None, ranks: Sequence[int] | None) -> Axis | None:
        mesh = None if plan is None or plan.encoders != "one" else plan.mesh(self._rank, ranks)
        axis = None if mesh is None else mesh.of_one_image()
        return axis if axis is not None and axis.size > 1 else None
