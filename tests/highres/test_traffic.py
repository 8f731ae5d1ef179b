"""What ranks send in a step: as counted, as the geometry says, and never more than the latent on average."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import diffusers
import pytest
import torch
from torch import Tensor

from benchmarks.highres.traffic import forecast, of_picture
from patchpar.errors import UnsupportedModel
from patchpar.highres.after_guidance import AfterGuidance
from patchpar.highres.blending import Blend
from patchpar.highres.weighing import Evidence, weighed
from patchpar.highres.windows import Tiling
from patchpar.highres.work import merged, share_out
from patchpar.strategies.structure_guidance import StructureGuidance
from patchpar.transport import DelayedTransport
from tests.unit.threads import on_threads

from .drawing import Case, alone, apart, draw, plain, prepared, together

LATENT = 4 * 16 * 16 * 4  # bytes: 128 x 128 pixels, fp32
LIMIT = 1e-5
KINDS = ("windows", "prediction", "anchor")


def values(sent: dict[str, int]) -> int:
    """Bytes of predictions; what ranks tell one another of weights is a few numbers."""
    return sum(sent.get(kind, 0) for kind in KINDS)


@pytest.mark.parametrize(("world", "options"), [(2, {}), (4, {}), (3, {"weight": 0.5, "kept": 0.0})])
def test_bytes_are_those_of_the_forecast(world: int, options: dict[str, Any]) -> None:
    """From the second step on, in both stages: what the geometry of patches and windows says, to the byte."""
    case = Case(options={"switch": 0.5} | options, steps=4)
    drawn = together(case, world)
    kept = options.get("kept", 1.0) > 0
    for step, late in ((1, False), (2, True), (3, True)):
        patches = 1 if not options else 4
        sent = [values(each.sent_in(step)) for each in drawn]
        if late:  # windows move from step to step, the forecast's do not
            told = forecast(2, world, native=8, patches=None, guide=kept)
            assert sum(sent) == pytest.approx(sum(each.all for each in told) * LATENT, rel=0.1)
        else:
            assert sent == [each.all * LATENT for each in forecast(2, world, native=8, patches=patches)]
        assert all(each.sent_in(step)["weights"] == (world - 1) * 3 * 3 * 8 for each in drawn)
    if world < 4:
        assert max(values(each.sent_in(3)) for each in drawn) <= 1.1 * LATENT


def test_half_of_what_branches_take() -> None:
    """The first step sends every branch, the next what guidance makes of them."""
    drawn = together(Case(options={"weight": 0.5, "switch": 0.2}, steps=3), 2)
    first, second = (sum(values(each.sent_in(step)) for each in drawn) for step in (0, 1))
    assert first == 2 * second


@pytest.mark.parametrize("scale", [2, 3, 4])
@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_a_picture_sends_no_more_than_its_latent_in_a_step(scale: int, ranks: int) -> None:
    """Of 50 steps, both branches in the first; per rank, on average."""
    assert of_picture(StructureGuidance(), scale, ranks) <= 1
    assert of_picture(StructureGuidance(preset="paper"), scale, ranks) <= 1.15


@pytest.mark.parametrize("guide", [True, False])
@pytest.mark.parametrize("scale", [2, 3, 4])
@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_nothing_is_sent_that_nobody_needs(scale: int, ranks: int, guide: bool) -> None:
    """Of others' bands what own windows cover and no more, to 2 %; and the closed formula of a step with windows.

    Whoever completes a place that windows of c ranks cover hears of c - 1 others at least. Were every place completed
    by a rank that covers it, that would be all: bands of rows, which are simpler, send at most 0.06 of the latent more.
    """
    native = 16
    side = scale * native
    windows = Tiling(moved=False).lay((side, side), (native, native), key="")
    blend = Blend.of(windows, merged(share_out(len(windows) + guide, 2, ranks)), 1)
    covered = torch.stack([blend.covered(place, torch.zeros(1)) for place in range(ranks)])
    beyond = covered.clone()
    for place in range(ranks):
        beyond[place, blend.bands.starts[place] : blend.bands.starts[place + 1]] = False
    told = forecast(scale, ranks, native=native, patches=None, guide=guide)
    pieces, least = sum(each.pieces for each in told), float((covered.sum(0) - 1).sum()) / side**2
    assert pieces == pytest.approx(float(beyond.sum()) / side**2, rel=0.02)
    assert least - 1e-9 <= pieces <= least + 0.06 * ranks
    owners = sum(any(unit.patch == len(windows) for unit in units) for units in blend.shares)
    assert sum(each.all for each in told) == pytest.approx(pieces + (ranks - 1) * (1 + owners / scale**2))


def test_a_slow_link() -> None:
    """The same picture over 1 Gbit/s with a millisecond of latency."""
    case = Case(steps=3)
    tinies = [prepared(case) for _ in range(2)]

    def behind(transport: Any) -> Any:
        return draw(DelayedTransport(transport, latency=1e-3, rate=125e6), case, tinies)

    want = alone(case)
    for drawn in on_threads(2, behind, deadline=60.0):
        assert apart(drawn.latents, want) < LIMIT


def test_guidance_that_depends_on_the_whole_is_given_the_whole() -> None:
    """guidance_rescale divides by a deviation over the picture: the first step shows that, and all branches go on."""
    case = Case(arguments={"height": 128, "width": 128, "guidance_rescale": 0.7})
    want = alone(case)
    drawn = together(case, 2)
    assert all(apart(each.latents, want) < LIMIT for each in drawn)
    assert all("weights" not in each.bytes_sent for each in drawn)
    assert apart(alone(Case()), want) > 1e-3


def test_what_is_wrong_without_looking(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: put off all the same, the same call is refused rather than drawn wrongly."""
    monkeypatch.setattr(AfterGuidance, "takes", lambda self, portion: True)
    case = Case(arguments={"height": 128, "width": 128, "guidance_rescale": 0.7})
    with pytest.raises(UnsupportedModel, match="guidance at step 0 is no mean of its branches"):
        together(case, 2)


def test_sizes_that_patches_do_not_make_exactly() -> None:
    """A patch then holds more than the latent, and goes to all by branches; windows do not."""
    case = Case(arguments={"height": 168, "width": 96})
    want = alone(case)
    drawn = together(case, 2)
    assert all(apart(each.latents, want) < LIMIT for each in drawn)
    assert "weights" not in drawn[0].sent_in(1)
    assert drawn[0].sent_in(2)["weights"] > 0


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_evidence_of_two_ranks_is_that_of_one() -> None:
    """Half of the places each; weights are found, and what is no mean is told apart."""
    branches, weights = noise(3, 2, 4, 8, 8), torch.tensor([[-2.0, 3.5, -0.5], [0.0, 1.0, 0.0]]).double()
    output = weighed(weights, branches)
    halves = [Evidence.of(output[..., rows, :], branches[..., rows, :]) for rows in (slice(4), slice(4, 8))]
    both = halves[0] + halves[1]
    assert torch.allclose(both.products, Evidence.of(output, branches).products)
    assert torch.allclose(both.weights_BK, weights, atol=1e-5)
    assert both.is_mean
    scaled = Evidence.of(0.9 * output, branches)
    assert scaled.is_sum
    assert not scaled.is_mean
    assert not Evidence.of(output * branches[0].sign(), branches).is_sum
    nothing = Evidence.of(output * torch.nan, branches)
    assert not (halves[0] + nothing).is_mean
    assert not (halves[0] + Evidence.of(1.3 * output[..., 4:, :], branches[..., 4:, :])).is_sum


def test_a_guide_whose_branches_are_on_two_ranks() -> None:
    """Nineteen units on two ranks would never part it; on seven they do."""
    case = Case(steps=2, options={"switch": 0.7}, scheduler=diffusers.DDIMScheduler)
    want = alone(case)
    drawn = together(replace(case), 7)
    assert sum("anchor" in each.sent_in(1) and each.sent_in(1)["anchor"] > 0 for each in drawn) == 1
    assert all(apart(each.latents, want) < LIMIT for each in drawn)
    assert apart(plain(case), want) > 1e-2
