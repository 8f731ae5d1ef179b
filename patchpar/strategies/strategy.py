"""Base of the strategies of axis `patch`: frozen options that make a denoiser parallel in bands or by tokens.

A strategy is defined by its exchange policy; the base class installs it in a denoiser and formats the options.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar

from patchpar.plan.exchange_policy import ExchangePolicy

if TYPE_CHECKING:
    from torch import nn

    from patchpar.comm.collectives import Communicator
    from patchpar.plan.mesh import Axis
    from patchpar.plan.step_clock import StepClock
    from patchpar.shard.transformer.denoiser import TokenDenoiser
    from patchpar.shard.unet.conditioner import BandedConditioner
    from patchpar.shard.unet.denoiser import PatchedDenoiser
    from patchpar.shard.verification_cache import VerificationCache


@dataclass(frozen=True, slots=True, kw_only=True)
class PatchStrategy:
    """Options of a strategy. A subclass has a `name` and a `policy`."""

    name: ClassVar[str]
    axis: ClassVar[str] = "patch"
    """The mesh axis that it is of."""
    for_one_rank: ClassVar[bool] = False
    """Whether it has an effect on one rank."""

    @property
    def policy(self) -> ExchangePolicy:
        """The policy of its exchange points."""
        raise NotImplementedError

    def check_group_size(self, group_ranks: int) -> None:
        """Raise PlanError for an unsupported number of ranks. Most strategies take any number."""

    def install(
        self,
        denoiser: nn.Module,
        comm: Communicator,
        axis: Axis,
        *,
        clock: StepClock | None = None,
        split: str = "auto",
        verifications: VerificationCache | None = None,
    ) -> PatchedDenoiser | TokenDenoiser:
        """Return `denoiser` made parallel over `axis`. Without `verifications` it is not verified.

        A network of convolutions and group norms is split into bands, any other by tokens.
        """
        # here, because a caller that only names a strategy need not import torch
        from patchpar.shard.attention.dispatch import on_link_of
        from patchpar.shard.transformer.denoiser import TokenDenoiser
        from patchpar.shard.unet.denoiser import PatchedDenoiser
        from patchpar.shard.unet.discover import splits_into_bands

        policy = replace(self.policy, keys=on_link_of(comm.transport, self.policy.keys))
        if splits_into_bands(denoiser):
            return PatchedDenoiser(
                denoiser, (comm, axis), policy, clock=clock, split=split, verifications=verifications
            )
        return TokenDenoiser(denoiser, (comm, axis), policy, clock=clock, verifications=verifications)

    def condition(
        self,
        network: nn.Module,
        comm: Communicator,
        axis: Axis,
        *,
        clock: StepClock | None = None,
        split: str = "auto",
        verifications: VerificationCache | None = None,
    ) -> BandedConditioner | None:
        """Return a network that conditions a denoiser, such as a ControlNet, in bands; None where it stays whole.

        Its exchanges are of this step, whatever the strategy.
        """
        from patchpar.shard.attention.dispatch import on_link_of
        from patchpar.shard.compiled import is_compiled, is_wrapped
        from patchpar.shard.unet.conditioner import BandedConditioner
        from patchpar.shard.unet.discover import splits_into_bands

        if is_wrapped(network) or is_compiled(network) or not splits_into_bands(network):
            return None
        fresh = ExchangePolicy() if self.policy.remembers else self.policy
        policy = replace(fresh, keys=on_link_of(comm.transport, fresh.keys))
        return BandedConditioner(network, (comm, axis), policy, clock=clock, split=split, verifications=verifications)

    def __str__(self) -> str:
        return as_text(self)


def as_text(options: Any) -> str:
    """Return a strategy's name and the options that differ from their defaults, as `parse_strategy` reads them."""
    given = [f"{f.name}={getattr(options, f.name)}" for f in fields(options) if getattr(options, f.name) != f.default]
    return str(options.name) + (":" + ":".join(given) if given else "")
