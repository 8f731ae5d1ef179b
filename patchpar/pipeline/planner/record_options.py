"""How a call is recorded, and what first calls find that later ones of the same model need not find again."""

from dataclasses import dataclass, field, replace

from torch import nn

from patchpar.models.dry_run.meta_mode import KnownForms
from patchpar.pipeline.planner.feature_plans import KnownFeatures
from patchpar.pipeline.planner.token_plans import KnownTokens
from patchpar.shard.unet.discover import ExchangeSites

STEPS = 4
"""Steps that are recorded: one exact, two until the values of two steps are known, and one that is like all others."""


@dataclass(slots=True)
class LearntFacts:
    """What the first call of a model finds: exchange points of UNets, and, by VAE and method, `SplitMethod.feeds`.

    `calls_by_branch`: guidance has a call for each branch, the first of which every rank makes; None if not known.
    """

    sites: dict[nn.Module, ExchangeSites] = field(default_factory=dict)
    feeds: dict[tuple[nn.Module, str], dict[str, bool]] = field(default_factory=dict)
    has_decoded: bool = False
    calls_by_branch: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordOptions:
    """How a call is recorded. It makes at most so many `steps`. `vae`, `exchange`: see `CallOptions`, `InstalledPlan`.

    `joined`: as on GPUs, with operations of several ranks at once, which NCCL has, and with fused kernels; without,
    as workers on a CPU. `tokens`, `features`: the token and feature plans of transformers, which are found by values.
    `known`: forms of results, see MetaMode. `learnt`: what first calls have found. Recordings of one model may share
    both.
    """

    steps: int = STEPS
    vae: str = "auto"
    joined: bool = False
    tokens: KnownTokens = field(default_factory=KnownTokens)
    features: KnownFeatures = field(default_factory=KnownFeatures)
    exchange: str = "on"
    known: KnownForms = field(default_factory=dict)
    learnt: LearntFacts = field(default_factory=LearntFacts)

    def with_steps(self, steps: int) -> "RecordOptions":
        """Return the options for calls of so many steps, which learn and know the same."""
        return replace(self, steps=steps)
