"""How a call is recorded, and what first calls find that later ones of the same model need not find again.

And token plans of transformers without values: those that come with the package, or were found by a real call before.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import diffusers
from torch import nn

from patchpar.errors import UnsupportedModel
from patchpar.models.dry_run.meta_mode import KnownForms
from patchpar.pipeline.planner.feature_plans import KnownFeatures
from patchpar.pipeline.planner.noted_decoding import Decoding
from patchpar.plan.plan import Plan
from patchpar.shard.fingerprint import Fingerprint
from patchpar.shard.transformer.shipped_plans import shipped_for
from patchpar.shard.transformer.token_plan import TokenPlan
from patchpar.shard.unet.discover import ExchangeSites
from patchpar.strategies.cfg.exchange import OutputForm

STEPS = 4
"""Steps that are recorded: one exact, two until the values of two steps are known, and one that is like all others."""


class KnownTokens:
    """Token plans by denoiser. `found`: by its class, before those that come with the package."""

    def __init__(self, found: Mapping[str, TokenPlan] | None = None) -> None:
        self._found = dict(found or {})

    def of(self, denoiser: nn.Module) -> TokenPlan:
        """Return the plan of a denoiser. Raises UnsupportedModel where none is known."""
        name = type(denoiser).__name__
        shipped = None if name in self._found else shipped_for(denoiser)
        plan = self._found.get(name) or (None if shipped is None else shipped.plan_for(denoiser))
        if plan is None:
            raise UnsupportedModel(
                f"how the tokens of {name} are split is found by computing with values, a recording has none, and the "
                f"package has no token plan of it as it is in diffusers {diffusers.__version__}: use cfg=2 or data=N, "
                "which do not split them"
            )
        return plan


def makes_known_calls(plan: Plan) -> bool:
    """Whether calls for one guidance branch are like those of others: no weights are divided, and no values kept."""
    keeps = plan.patch > 1 and plan.strategy.policy.remembers
    return plan.weights == "whole" and plan.stage * plan.tensor == 1 and not keeps


@dataclass(slots=True)
class LearntFacts:
    """What the first call of a model finds: exchange points of UNets, and, by VAE and method, `SplitMethod.feeds`.

    And what is looked up for it: token plans of transformers, and fingerprints. `decodings`: what VAEs decode in a call
    of one rank; None if not known.
    `calls_by_branch`: guidance has a call for each branch, the first of which every rank makes; None if not known.
    `forms`: what those calls return under plans that make known ones, see `GuidanceSplit.forms`.
    """

    sites: dict[nn.Module, ExchangeSites] = field(default_factory=dict)
    feeds: dict[tuple[nn.Module, str], dict[str, bool]] = field(default_factory=dict)
    tokens: dict[nn.Module, TokenPlan] = field(default_factory=dict)
    fingerprints: dict[nn.Module, Fingerprint] = field(default_factory=dict)
    has_decoded: bool = False
    decodings: Sequence[Decoding | None] | None = None
    calls_by_branch: bool | None = None
    forms: dict[Any, OutputForm | None] = field(default_factory=dict)


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
