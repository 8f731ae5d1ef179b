"""ControlNets on the ranks of a plan: each rank runs its guidance branches, and its band of the image."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from torch import nn

from patchpar.comm.collectives import Communicator
from patchpar.comm.pytree import on_own_lists
from patchpar.plan.mesh import Mesh
from patchpar.plan.plan import Plan
from patchpar.shard.batch_arguments import BatchArguments, carriers_of
from patchpar.shard.compiled import is_compiled
from patchpar.shard.hooks import ForwardHook, InstalledHook
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


class Conditioner(ForwardHook):
    """Hook on a ControlNet, which runs by guidance branches, in bands, both, or neither, which is whole.

    `carriers`: finds which of its arguments carry the batch, if that is verified. The network then raises
    VerificationError if parts of its batch do not add up.
    """

    def __init__(
        self, guidance: GuidanceSplit | None, carriers: BatchArguments | None, in_bands: BandedConditioner | None
    ) -> None:
        super().__init__(self._call)
        self.guidance, self.carriers, self.in_bands = guidance, carriers, in_bands

    @property
    def divides(self) -> bool:
        """Whether ranks run parts of its calls."""
        return self.guidance is not None or self.in_bands is not None

    def _call(self, _: nn.Module, plain: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        forward = plain if self.in_bands is None else partial(self.in_bands.condition, plain)
        if self.guidance is None:
            return forward(*args, **kwargs)
        carriers = {} if self.carriers is None else self.carriers.of(on_own_lists(plain), (args, kwargs))
        self.guidance.carriers = carriers
        return self.guidance.condition(forward, *args, **kwargs)


def hooks_on_conditioners(
    pipe: Any,
    plan: Plan,
    mesh: tuple[Communicator, Mesh],
    guidance: GuidanceSplit | None,
    *,
    bands: bool,
    **options: Any,
) -> Iterator[tuple[nn.Module, Conditioner]]:
    """Yield the hooks of ControlNets that are divided. `bands`: a denoiser is in bands; `options`: of that denoiser."""
    (comm, axes), verifications = mesh, options["verifications"]
    for module, is_of_several in conditioners_of(pipe):
        shared, carriers = None if is_of_several else guidance, None
        in_bands = plan.strategy.condition(module, comm, axes["patch"], **options) if bands else None
        if shared is not None and verifications is not None:
            carriers = carriers_of(module, (comm, axes["cfg"]), verifications)
        hook = Conditioner(shared, carriers, in_bands)
        if hook.divides:
            yield module, hook


def is_left_to_its_compiler(hooked: InstalledHook) -> bool:
    """Remove the hook of a ControlNet that has been compiled as a whole, if it has only bands; return whether it is so.

    Its code would be compiled with the network.
    """
    hook = hooked.hook
    if not isinstance(hook, Conditioner) or hook.guidance is not None or not is_compiled(hooked.module):
        return False
    hooked.remove()
    return True
