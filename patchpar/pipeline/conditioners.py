"""ControlNets on the ranks of a plan: each rank runs its guidance branches, and its band of the image."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

from patchpar.comm.pytree import on_own_lists
from patchpar.shard.batch_arguments import BatchArguments
from patchpar.shard.hooks import ForwardHook
from patchpar.shard.unet.conditioner import BandedConditioner
from patchpar.strategies.cfg.split import GuidanceSplit


def conditioners_of(pipe: Any) -> Iterator[tuple[nn.Module, bool]]:
    """Yield each ControlNet of a pipeline, and whether the outputs of several are added up.

    Of these each guidance rank runs the whole batch.
    """
    found = pipe.components.get("controlnet")
    several = getattr(found, "nets", None)
    for each in [found] if several is None else several:
        if isinstance(each, nn.Module):
            yield each, several is not None


@dataclass(frozen=True, slots=True)
class Conditioner:
    """How the ranks run a ControlNet: by guidance branches, in bands, both, or neither, which is whole.

    `carriers`: finds which of its arguments carry the batch, if that is verified.
    """

    guidance: GuidanceSplit | None = None
    carriers: BatchArguments | None = None
    in_bands: BandedConditioner | None = None

    def hook(self) -> ForwardHook | None:
        """Return a hook on the network, which then raises VerificationError if parts of its batch do not add up."""
        return None if self.guidance is None and self.in_bands is None else ForwardHook(self._run)

    def _run(self, _: nn.Module, plain: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        forward = plain if self.in_bands is None else partial(self.in_bands.condition, plain)
        if self.guidance is None:
            return forward(*args, **kwargs)
        carriers = {} if self.carriers is None else self.carriers.of(on_own_lists(plain), (args, kwargs))
        self.guidance.carriers = carriers
        return self.guidance.condition(forward, *args, **kwargs)
