"""What ranks send in a step: as counted, as the geometry says, and no more than the latent on average."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import diffusers
import pytest
import torch
from torch import Tensor

from benchmarks.highres.traffic import forecast, mean, most, of_image, stages, with_windows
from patchpar.comm.transport import DelayedTransport
from patchpar.errors import UnsupportedModel
from patchpar.strategies.structure.after_guidance import AfterGuidance
from patchpar.strategies.structure.blending import WEIGHTS, BlendPlan
from patchpar.strategies.structure.guidance_fit import GuidanceFit, weighed
from patchpar.strategies.structure.interlace import Interlace
from patchpar.strategies.structure.needed_regions import NeededRegions, WindowPlan
from patchpar.strategies.structure.options import StructureGuidance
from patchpar.strategies.structure.structure import anchored
from patchpar.strategies.structure.windows import Tiling
from patchpar.strategies.structure.work_schedule import assign_units, merged, scheduled
from tests.breadth import first_of
from tests.tensors import noise, relative
from tests.unit.threads import on_threads

from .generation import Case, alone, generate, plain, prepared, together

LATENT = 4 * 16 * 16 * 4  # bytes: 128 x 128 pixels, fp32
LIMIT = 1e-5
KINDS = ("windows", "prediction", "anchor", "latents")


def values(sent: dict[str, int]) -> int:
    """Bytes of predictions; what ranks tell one another of weights is a few numbers."""
    assert sent.keys() <= {*KINDS, WEIGHTS}
    return sum(sent.get(kind, 0) for kind in KINDS)


@pytest.mark.parametrize(
    ("world", "options"), first_of([(2, {}), (4, {}), (3, {"weight": 0.5, "structure_strength": 0.0})], (2, {}))
)
def test_bytes_are_those_of_the_forecast(world: int, options: dict[str, Any]) -> None:
    """From the second step on, in both stages and in the last step: what the geometry says, to the byte."""
    case = Case(options={"switch": 0.5} | options, steps=4)
    generated, patches = together(case, world), 4 if options else 1
    late: dict[str, Any] = {"native": 8, "guide": options.get("structure_strength", 1.0) > 0}
    reported = {
        1: forecast(2, world, native=8, patches=patches),
        2: with_windows(2, world, key="0 2", **late),
        3: with_windows(2, world, key="0 3", to="last", **late),
    }
    for step, sent in reported.items():
        assert [values(each.sent_in(step)) for each in generated] == [each.all * LATENT for each in sent]
        assert all(each.sent_in(step)["weights"] == (world - 1) * 3 * 3 * 8 for each in generated)


def test_everything_is_sent_where_somebody_looks() -> None:
    """The whole prediction in every step with windows, the last one too, and no latents."""
    generated = together(Case(options={"switch": 0.5}, steps=4, watched=True), 2)
    for step in (2, 3):
        reported = with_windows(2, 2, native=8, guide=True, key=f"0 {step}", to="all")
        assert [values(each.sent_in(step)) for each in generated] == [each.all * LATENT for each in reported]
    assert all("latents" not in each.bytes_sent for each in generated)


def test_half_of_what_branches_take() -> None:
    """The first step sends every branch, the next what guidance makes of them."""
    generated = together(Case(options={"weight": 0.5, "switch": 0.2}, steps=3), 2)
    first, second = (sum(values(each.sent_in(step)) for each in generated) for step in (0, 1))
    assert first == 2 * second


@pytest.mark.parametrize("scale", [2, 3, 4])
@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_no_step_sends_more_than_its_latent(scale: int, ranks: int) -> None:
    """On average over the ranks, and none much more; only the last, which makes latents whole, somewhat more."""
    for preset in ("calibrated", "paper"):
        strategy = StructureGuidance(preset=preset)
        found = stages(strategy, scale, ranks)
        assert mean(found.before) <= 1
        assert mean(found.last) <= 1.17
        assert most(found.last) <= 1.4
        assert of_image(strategy, found) <= (0.5 if preset == "calibrated" else 0.8)
        for step in range(10):
            moved = with_windows(scale, ranks, guide=strategy.method.structure_strength > 0, key=f"0 {step}")
            assert mean(moved) <= 0.76
            assert most(moved) <= 1.2


def test_what_it_was_when_all_got_everything() -> None:
    """The negative control: a limit that everything to all would keep says nothing."""
    found = with_windows(2, 8, guide=True, to="all")
    assert mean(found) > 1.3
    assert most(found) > 2.8


@pytest.mark.parametrize("guide", [True, False])
@pytest.mark.parametrize(("size", "ranks"), [((64, 64), 8), ((96, 96), 3), ((100, 70), 4), ((128, 64), 2)])
def test_regions_are_what_answers_depend_on(size: tuple[int, int], ranks: int, guide: bool) -> None:
    """With no number elsewhere what a rank needs is there; and by its gradient, little comes that it does not need."""
    tiling, native = Tiling(), (32, 32)
    zones, interlace = tiling.zones(size, native, unit=2), Interlace.of(size, native)
    state = WindowPlan(zones=zones, schedule=scheduled(len(zones) + guide, 2, ranks), interlace=interlace)
    whole, small = noise(1, 1, *size), noise(1, 1, *interlace.patch_size, seed=1)
    for last, group_rank in product((False, True), range(ranks)):
        regions, wanted = NeededRegions.of(state, last=last), state.wanted(group_rank, last=last)
        cells, positions = regions.cells[group_rank], torch.cat(regions.parts[group_rank])
        x, y = (only(*each).requires_grad_() for each in ((whole, positions), (small, cells)))
        answer = anchored(interlace, x, y - interlace.split(x)[0], 0.7) if guide else x
        assert answer[0, 0][wanted].isfinite().all()
        x, y = whole.clone().requires_grad_(), small.clone().requires_grad_()
        answer = anchored(interlace, x, y - interlace.split(x)[0], 0.7) if guide else x + 0 * y.sum()
        answer[0, 0][wanted].square().sum().backward()
        assert x.grad is not None
        assert y.grad is not None
        assert x.grad.count_nonzero() <= len(positions) <= 1.1 * x.grad.count_nonzero()
        assert y.grad.count_nonzero() <= len(cells) <= 1.25 * y.grad.count_nonzero()


def only(x: Tensor, positions: Tensor) -> Tensor:
    """No number elsewhere."""
    found = torch.full_like(x, torch.nan)
    found.view(-1)[positions] = x.view(-1)[positions]
    return found


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
    blend = BlendPlan.of(windows, merged(assign_units(len(windows) + guide, 2, ranks)), 1)
    covered = torch.stack([blend.covered(group_rank, torch.zeros(1)) for group_rank in range(ranks)])
    beyond = covered.clone()
    for group_rank in range(ranks):
        beyond[group_rank, blend.bands.starts[group_rank] : blend.bands.starts[group_rank + 1]] = False
    reported = with_windows(scale, ranks, native=native, guide=guide, to="all")
    pieces, least = sum(each.pieces for each in reported), float((covered.sum(0) - 1).sum()) / side**2
    assert pieces == pytest.approx(float(beyond.sum()) / side**2, rel=0.02)
    assert least - 1e-9 <= pieces <= least + 0.06 * ranks
    owners = sum(any(unit.patch == len(windows) for unit in units) for units in blend.assignment)
    assert sum(each.all for each in reported) == pytest.approx(pieces + (ranks - 1) * (1 + owners / scale**2))


def test_a_slow_link() -> None:
    """The same image over 1 Gbit/s with a millisecond of latency."""
    case = Case(steps=3)
    tinies = [prepared(case) for _ in range(2)]

    def behind(transport: Any) -> Any:
        return generate(DelayedTransport(transport, latency=1e-3, rate=125e6), case, tinies)

    want = alone(case)
    for generated in on_threads(2, behind, deadline=60.0):
        assert relative(generated.latents, want) < LIMIT


def test_guidance_that_depends_on_the_whole_is_given_the_whole() -> None:
    """guidance_rescale divides by a deviation over the image: the first step shows that, and all branches go on."""
    case = Case(arguments={"height": 128, "width": 128, "guidance_rescale": 0.7})
    want = alone(case)
    generated = together(case, 2)
    assert all(relative(each.latents, want) < LIMIT for each in generated)
    assert all("weights" not in each.bytes_sent for each in generated)
    assert relative(alone(Case()), want) > 1e-3


def test_what_is_wrong_without_looking(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: put off all the same, the same call is refused rather than drawn wrongly."""
    monkeypatch.setattr(AfterGuidance, "takes", lambda self, partial_prediction: True)
    case = Case(arguments={"height": 128, "width": 128, "guidance_rescale": 0.7})
    with pytest.raises(UnsupportedModel, match="guidance at step 0 is no weighted mean of its branches"):
        together(case, 2)


def test_calls_with_other_branches_are_refused() -> None:
    """A rank has other patches in each, unless it is said before that there are such calls."""
    skipping = {"skip_guidance_layers": [1], "skip_layer_guidance_start": 0.0, "skip_layer_guidance_stop": 0.9}
    case = Case(pipeline="sd3", arguments={"height": 128, "width": 128, **skipping})
    with pytest.raises(UnsupportedModel, match=r"step 1 has calls of 2 and of 1 guidance branches.*use one device"):
        together(case, 2)


def test_sizes_that_patches_do_not_make_exactly() -> None:
    """A patch then holds more than the latent, and goes to all by branches; windows do not."""
    case = Case(arguments={"height": 168, "width": 96})
    want = alone(case)
    generated = together(case, 2)
    assert all(relative(each.latents, want) < LIMIT for each in generated)
    assert "weights" not in generated[0].sent_in(1)
    assert generated[0].sent_in(2)["weights"] > 0


def test_evidence_of_two_ranks_is_that_of_one() -> None:
    """Half of the places each; weights are found, and what is no mean is told apart."""
    branches, weights = noise(3, 2, 4, 8, 8), torch.tensor([[-2.0, 3.5, -0.5], [0.0, 1.0, 0.0]]).double()
    output = weighed(weights, branches)
    halves = [GuidanceFit.of(output[..., rows, :], branches[..., rows, :]) for rows in (slice(4), slice(4, 8))]
    both = halves[0] + halves[1]
    assert torch.allclose(both.products, GuidanceFit.of(output, branches).products)
    assert torch.allclose(both.weights_BK, weights, atol=1e-5)
    assert both.is_mean
    scaled = GuidanceFit.of(0.9 * output, branches)
    assert scaled.is_sum
    assert not scaled.is_mean
    assert not GuidanceFit.of(output * branches[0].sign(), branches).is_sum
    nothing = GuidanceFit.of(output * torch.nan, branches)
    assert not (halves[0] + nothing).is_mean
    assert not (halves[0] + GuidanceFit.of(1.3 * output[..., 4:, :], branches[..., 4:, :])).is_sum


@pytest.mark.breadth
def test_a_guide_whose_branches_are_on_two_ranks() -> None:
    """Nineteen units on two ranks would never part it; on seven they do."""
    case = Case(steps=2, options={"switch": 0.7}, scheduler=diffusers.DDIMScheduler)
    want = alone(case)
    generated = together(replace(case), 7)
    assert sum("anchor" in each.sent_in(1) and each.sent_in(1)["anchor"] > 0 for each in generated) == 1
    assert all(relative(each.latents, want) < LIMIT for each in generated)
    assert relative(plain(case), want) > 1e-2
