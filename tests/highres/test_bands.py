"""What does not come out even is computed by teams of ranks, in bands; the image stays that of one rank."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any

import diffusers
import pytest

from benchmarks.highres.speed import Seconds, predicted
from patchpar.comm.collectives import Communicator
from patchpar.errors import PlanError
from patchpar.pipeline.startup import plan_of
from patchpar.plan.mesh import Axis
from patchpar.plan.plan import Plan
from patchpar.shard.verification_cache import VerificationCache
from patchpar.strategies.structure.options import StructureGuidance
from patchpar.strategies.structure.work_schedule import Unit, evaluations_of, scheduled
from tests.breadth import first_of
from tests.tensors import relative
from tests.tiny import latents
from tests.unit.threads import on_threads

from .generation import Case, alone, large, prepared, together

LIMIT = 1e-5


@pytest.mark.parametrize("branches", [1, 2])
@pytest.mark.parametrize(("ranks", "bands"), [(1, 1), (2, 2), (4, 2), (4, 4), (6, 3), (8, 4), (8, 8), (16, 4)])
@pytest.mark.parametrize("patches", [1, 4, 9, 10, 25])
def test_every_unit_once_and_never_later(patches: int, branches: int, ranks: int, bands: int) -> None:
    """Whole or by one team, each the portion of one rank; and no rank has longer than with whole units."""
    units = {Unit(patch, branch) for patch in range(patches) for branch in range(branches)}
    schedule = scheduled(patches, branches, ranks, bands)
    of_teams = list(chain(*schedule.split_units[::bands]))
    assert len(of_teams) == len(set(of_teams))
    assert sorted(map(repr, [*chain(*schedule.whole_units), *of_teams])) == sorted(map(repr, units))
    assert sorted(map(repr, chain(*schedule.assignment))) == sorted(map(repr, units))
    for rank, own in enumerate(schedule.assignment):
        assert schedule.split_units[rank] == schedule.split_units[rank - rank % bands]
        assert set(own) <= {*schedule.whole_units[rank], *schedule.split_units[rank]}
    whole = scheduled(patches, branches, ranks)
    longest = max(len(a) + len(t) / bands for a, t in zip(schedule.whole_units, schedule.split_units, strict=True))
    assert longest <= max(map(len, whole.whole_units))


def test_nine_windows_and_their_anchor_on_eight_ranks() -> None:
    """A window with both branches for each, the ninth and the anchor for a team each."""
    schedule = scheduled(10, 2, 8, 4)
    assert [evaluations_of(units, 2)[0].patch for units in schedule.whole_units] == list(range(8))
    assert schedule.split_units == ((Unit(8, 0), Unit(8, 1)),) * 4 + ((Unit(9, 0), Unit(9, 1)),) * 4
    assert [len(units) for units in schedule.assignment] == [3, 3, 2, 2, 3, 3, 2, 2]
    assert scheduled(1, 2, 8, 4).split_units == ((Unit(0, 0),),) * 4 + ((Unit(0, 1),),) * 4
    assert scheduled(10, 2, 4, 2).split_units == ((),) * 4  # five each


MODES: dict[str, tuple[int, dict[str, Any]]] = {
    "the anchor alone, then twenty units": (8, {"bands": 2}),
    "eighteen units": (4, {"bands": 2, "structure_strength": 0.0}),
    "lagging": (4, {"bands": 2, "lag": 1, "structure_strength": 0.0}),
    "masked": (4, {"bands": 2, "masked": True, "structure_strength": 0.0}),
    "a guide of its own": (8, {"bands": 2, "guide": "flow", "switch": 0.7}),
}


@pytest.mark.breadth
@pytest.mark.parametrize("mode", first_of(MODES, "eighteen units"))
def test_ranks_generate_the_image_of_one(mode: str) -> None:
    world, options = MODES[mode]
    want = alone(Case(options=options))
    generated = together(Case(options=options), world)
    assert all(relative(each.latents, want) < LIMIT for each in generated)
    assert any(each.bytes_sent.get("kv", 0) > 0 for each in generated)


@pytest.mark.breadth
def test_guidance_of_the_whole_and_a_team_of_all() -> None:
    """Sides that patches do not make exactly, guidance that all ranks need every branch for, and four bands a patch."""
    arguments = {"height": 264, "width": 192, "guidance_rescale": 0.7}
    options = {"bands": 4, "native": 128, "structure_strength": 0.0}
    case = Case(options=options, arguments=arguments, scheduler=diffusers.DDIMScheduler, steps=2)
    want = alone(case)
    assert all(relative(generated.latents, want) < LIMIT for generated in together(case, 4))


def test_bands_that_hear_nothing_generate_another_image() -> None:
    """The negative control: nothing is exchanged, within a team either."""
    options = {"bands": 2, "switch": 0.7}
    found = together(Case(exchange="off", options=options), 4)
    assert relative(found[0].latents, alone(Case(options=options))) > 1e-2


def test_teams_are_verified(tmp_path: Path) -> None:
    """Their bands against the plain forward, once; the verdict is kept. And nothing is left in the denoiser."""
    tinies = [prepared(Case()) for _ in range(4)]

    def generate(transport: Any) -> float | None:
        tiny = tinies[transport.rank]
        before = {name: set(vars(module)) for name, module in tiny.denoiser.named_modules()}
        strategy = StructureGuidance(native=64, bands=2)
        axis, comm = Axis("patch", transport.rank, 4, tuple(range(4))), Communicator(transport)
        trusted = frozenset({"tests"})  # the forward that `large` puts in; threads share torch's random state
        verifications = VerificationCache(tmp_path / str(transport.rank), trusted=trusted)
        with large(tiny, strategy, comm, axis, verifications=verifications) as found:
            latents(tiny, steps=2, height=128, width=128)
            assert found.team is not None
            error = found.team.error
        assert {name: set(vars(module)) for name, module in tiny.denoiser.named_modules()} == before
        return error

    errors = on_threads(4, generate, deadline=60.0)
    assert all(isinstance(error, float) and error < 1e-4 for error in errors), errors
    # Of each rank one; the forward that the test has put into the denoiser is compared in the call, which is not kept.
    assert len(list(tmp_path.rglob("*.json"))) == 4


def test_what_eight_ranks_gain_at_most() -> None:
    """At twice the native side, of 50 steps, where branches and bands would cost nothing: what units allow.

    Calibrated 32 of the anchor alone and 18 of ten units with two branches, which whole units leave at three each.
    """
    whole = Seconds(both=2.0, one=1.0, decode=0.0, png=0.0, in_bands={(4, 1): 0.25, (4, 2): 0.5})
    gains = {
        name: predicted(strategy, whole, 2, 1).all / predicted(strategy, whole, 2, 8).all
        for name, strategy in {
            "calibrated": StructureGuidance(),
            "paper": StructureGuidance(preset="paper"),
            "calibrated, bands": StructureGuidance(bands=4),
            "paper, bands": StructureGuidance(preset="paper", bands=4),
        }.items()
    }
    assert gains["calibrated"] == pytest.approx((32 * 2 + 18 * 20) / (32 + 18 * 3))
    assert gains["paper"] == pytest.approx((25 * 8 + 25 * 18) / (25 + 25 * 3))
    assert gains["calibrated, bands"] == pytest.approx(8)
    assert gains["paper, bands"] == pytest.approx(8)


def test_what_is_refused() -> None:
    with pytest.raises(PlanError, match="windows with context are not split"):
        StructureGuidance(bands=2, context=0.5)
    with pytest.raises(PlanError, match=r"bands=0: it is a number of ranks"):
        StructureGuidance(bands=0)
    with pytest.raises(PlanError, match=r"bands=4: axis 'patch' has 6 ranks, no multiple of it: use a divisor of 6"):
        plan_of(Plan(patch=6, strategy=StructureGuidance(bands=4)))
    with pytest.raises(PlanError, match=r"bands=4: 8 latent rows make 2 bands of 4: use at most bands=2"):
        together(Case(options={"bands": 4}), 4)
    with pytest.raises(PlanError, match=r"bands=2: SD3Transformer2DModel is no network of convolutions"):
        together(Case(pipeline="sd3", options={"bands": 2}), 2)
