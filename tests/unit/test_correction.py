"""A few numbers for each channel tell how tokens have changed, wherever that change is common to them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from benchmarks.emulation.sight import LEAST_BEFOREHAND, corrected_tokens, part_of_line
from patchpar.plan.plan import PlanError
from patchpar.shard.kernels.correct_matrices import correct_by_matrices
from patchpar.shard.kernels.correct_tokens import correct_run
from patchpar.shard.stale.correction import OwnPast, OwnTokens, kind_for, numbers_of, stride_for
from patchpar.strategies.fresh_edges import FreshEdges

SHAPE = (60, 2, 3, 8)  # tokens, keys and values, heads, numbers of a head


def noise(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape or SHAPE, generator=torch.Generator().manual_seed(seed))


def fitted(kind: str, now: Tensor, held: Tensor, old: Tensor) -> Tensor:
    """Of tokens as they are now, as others hold them, one step beyond `old` on a straight line, and as they were."""
    past = OwnPast(kind, extrapolated=True)
    past.remember(old - (held - old), continues=False)
    past.remember(old, continues=True)
    return past.fit(now, torch.ones(()))


def corrected(held: Tensor, old: Tensor, fit: Tensor) -> Tensor:
    """What others make of tokens [l, ...] of one rank by its fit."""
    into, affine = torch.full_like(held, torch.nan)[None], fit.shape[-1] == numbers_of("affine", held.shape[-1])
    correct = correct_run if affine else correct_by_matrices
    correct(into, old[None], (old - (held - old))[None], fit[None], torch.ones(()))
    return into[0]


def parts(fit: Tensor, width: int = 8) -> tuple[Tensor, Tensor, Tensor]:
    """The way along the line, factors and summands."""
    along, scale, shift = fit.split_with_sizes((1, fit.shape[-1] - width - 1, width), -1)
    return along[..., 0], scale, shift


def off(kind: str, now: Tensor, old: Tensor) -> float:
    """How much of the change is left, once what was told is applied."""
    held = corrected(old, old, fitted(kind, now, old, old))
    return float((now - held).norm() / (now - old).norm())


def scaled(old: Tensor) -> Tensor:
    """Every channel of every head has a factor and a summand of its own."""
    return old * (1 + 0.3 * noise(1, 1, 2, 3, 8)) + 5 * noise(2, 1, 2, 3, 8)


def mixed(old: Tensor) -> Tensor:
    """Every head has a matrix of its own."""
    return (old.movedim(0, -2) @ noise(3, 2, 3, 8, 8)).movedim(-2, 0) + noise(4, 1, 2, 3, 8)


def test_what_channels_have_in_common_is_told() -> None:
    old = noise(0) + 4
    assert off("affine", scaled(old), old) < 2e-3
    assert off("linear", scaled(old), old) < 2e-3
    assert off("affine", mixed(old), old) > 0.1
    assert off("linear", mixed(old), old) < 5e-3


def test_what_tokens_do_not_share_is_not() -> None:
    assert 0.65 < off("affine", noise(1), noise(0)) < 0.75  # independent tokens are as good as none: 1 of sqrt(2)


def test_only_what_others_do_not_hold_already_is_told() -> None:
    old, held = noise(0), noise(1)
    along, scale, shift = parts(fitted("linear", held, held, old))
    assert torch.allclose(along, torch.ones(2, 3))
    assert scale.abs().max() < 1e-6
    assert shift.abs().max() < 1e-6


def test_how_much_of_the_line_was_right_is_told() -> None:
    """A line that goes once and a half as far as tokens did would leave half of their change."""
    old, moved = noise(0), 0.1 * noise(1)
    held = old + 1.5 * moved
    fit = fitted("affine", old + moved, held, old)
    assert torch.allclose(parts(fit)[0], torch.full((2, 3), 2 / 3), atol=1e-3)
    assert torch.allclose(corrected(held, old, fit), old + moved, atol=1e-3)


def test_a_line_that_led_elsewhere_is_followed_half_of_its_way_at_least() -> None:
    old, held = noise(0), noise(0) + 1e-3 * noise(1)
    assert torch.equal(parts(fitted("affine", old + noise(1), held, old))[0], torch.ones(2, 3))
    assert torch.equal(parts(fitted("affine", old - noise(1), held, old))[0], torch.full((2, 3), 0.5))
    assert torch.equal(parts(fitted("affine", noise(1), old, old))[0], torch.full((2, 3), 0.5))  # of no way at all


@pytest.mark.parametrize("kind", ["affine", "linear"])
def test_averages_are_corrected_like_their_tokens(kind: str) -> None:
    old, now = noise(0), mixed(noise(0))
    fit = fitted(kind, now, old, old)
    each, mean = corrected(old, old, fit), old.mean(0, keepdim=True)
    assert torch.allclose(corrected(mean, mean, fit), each.mean(0, keepdim=True), atol=1e-5)


@pytest.mark.parametrize("kind", ["affine", "linear"])
@pytest.mark.parametrize("tokens", [1, 2, 60])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_few_or_equal_tokens_do_no_harm(kind: str, tokens: int, dtype: torch.dtype) -> None:
    old = torch.full((tokens, 1, 2, 8), 300.0, dtype=dtype)
    for now in (old.clone(), 2 * old):
        assert torch.allclose(corrected(old, old, fitted(kind, now, old, old)), now, rtol=1e-2)


def test_a_factor_comes_from_some_tokens_and_a_mean_from_all() -> None:
    """What is left has no mean, whichever tokens are looked at: attention would not average that away."""
    old, now = noise(0, 4096, 1, 2, 8), noise(0, 4096, 1, 2, 8) * 1.3 + noise(1, 4096, 1, 2, 8)
    held = corrected(old, old, fitted("affine", now, old, old))
    assert (now - held).mean(0).abs().max() < 1e-5
    assert off("affine", now * 0 + old * 1.3, old) < 2e-3
    assert (stride_for("affine", 4096), stride_for("linear", 4096)) == (17, 1)


@pytest.mark.parametrize("kind", ["affine", "linear"])
@pytest.mark.parametrize("tokens", [60, 511, 512, 700, 4096])
def test_fits_are_the_regressions_of_the_emulation(kind: str, tokens: int) -> None:
    old, held, now = (noise(seed, tokens, 2, 3, 8) + 2 for seed in range(3))
    want = corrected_tokens(kind, *(x.movedim(0, -2) for x in (now, held, old))).movedim(-2, 0)
    assert torch.allclose(corrected(held, old, fitted(kind, now, held, old)), want, atol=1e-4)


def kept(held: Tensor, old: Tensor, kind: str = "affine") -> tuple[OwnPast, OwnTokens]:
    """The past of tokens that their owner extrapolates, to `held` one step beyond `old` on a straight line."""
    tokens = OwnTokens(torch.empty_like(old), torch.empty_like(old))
    past = OwnPast(kind, extrapolated=True, kept=tokens)
    past.remember(old - (held - old), continues=False)
    past.remember(old, continues=True, ratio=torch.ones(()))
    return past, tokens


def moved_to(past: OwnPast, tokens: OwnTokens, now: Tensor, ratio: float = 1.0) -> tuple[Tensor, Tensor]:
    """What an owner sends before it has the tokens of this step, and what others make of that by its fit."""
    sent = torch.full_like(now, torch.nan)
    past.extrapolate(sent, tokens, torch.tensor(ratio))
    fit, into = past.fit(now, torch.tensor(ratio)), torch.full_like(now, torch.nan)[None]
    affine = fit.shape[-1] == numbers_of("affine", now.shape[-1])
    (correct_run if affine else correct_by_matrices)(into, sent[None], None, fit[None], torch.tensor(ratio))
    return sent, into[0]


@pytest.mark.parametrize("kind", ["affine", "linear"])
@pytest.mark.parametrize("tokens", [60, 511, 512, 700, 4096])
def test_owners_send_what_the_emulation_says(kind: str, tokens: int) -> None:
    """The first time they go seven tenths of the line, and then as far as the tokens went."""
    old, held, now, later = (noise(seed, tokens, 2, 3, 8) + 2 for seed in range(4))
    now = now * 0.1 + 0.85 * held + 0.15 * old
    past, own = kept(held, old, kind)
    along = torch.full((2, 3, 1, 1), LEAST_BEFOREHAND)
    for step, ahead, last, before in ((now, held, old, 2 * old - held), (later, now + 0.9 * (now - old), now, old)):
        ratio = 1.0 if last is old else 0.9
        sent, got = moved_to(past, own, step, ratio)
        heads_first = [x.movedim(0, -2) for x in (step, ahead, last)]
        assert torch.allclose(sent, (last + along[..., 0] * ratio * (last - before)), atol=1e-5)
        assert torch.allclose(got, corrected_tokens(kind, *heads_first, along).movedim(-2, 0), atol=1e-4)
        along = part_of_line(kind, *heads_first).float()
        assert torch.equal(own.last, step)
        assert torch.equal(own.before, last)


@pytest.mark.parametrize("kind", ["affine", "linear"])
def test_how_far_tokens_went_in_an_exact_step_is_known_too(kind: str) -> None:
    first, line, other = (noise(seed) for seed in range(3))
    went = first + 0.85 * line + 0.1 * other
    want = part_of_line(kind, *(x.movedim(0, -2) for x in (went, first + line, first)))[..., 0, 0].float()
    assert LEAST_BEFOREHAND < want.min() < want.max() < 1
    for is_exact in (True, False):
        past, _ = kept(first + line, first, kind)
        if is_exact:
            past.remember(went, continues=True, ratio=torch.ones(()))
        else:
            past.fit(went, torch.ones(()))
        assert torch.allclose(past.fit(other, torch.ones(()))[..., 0], want, atol=1e-4)


def test_nothing_of_the_last_image_is_left_in_what_owners_send() -> None:
    (past, own), (alone, same) = kept(noise(0), noise(1)), kept(noise(2), noise(3))
    for each, tokens in ((past, own), (alone, same)):
        each.remember(noise(4), continues=False)
        sent = torch.empty_like(noise(4))
        each.extrapolate(sent, tokens, torch.ones(()))
        assert torch.equal(sent, noise(4))
    assert torch.equal(past.fit(noise(5), torch.ones(())), alone.fit(noise(5), torch.ones(())))
    assert torch.equal(past.fit(noise(6), torch.ones(())), alone.fit(noise(6), torch.ones(())))


def test_matrices_only_where_tokens_outweigh_them() -> None:
    assert kind_for("linear", 36, 8) == "linear"
    assert kind_for("linear", 35, 8) == "affine"
    assert kind_for("affine", 10_000, 8) == "affine"
    assert kind_for("none", 10_000, 8) == "none"


@pytest.mark.parametrize("kind", ["affine", "linear"])
def test_what_is_told_is_one_message(kind: str) -> None:
    assert fitted(kind, noise(1), noise(0), noise(0)).shape == (2, 3, numbers_of(kind, 8))


@pytest.mark.parametrize("extrapolated", [True, False])
def test_the_owner_knows_what_others_make_of_its_past(extrapolated: bool) -> None:
    steps = [noise(seed) for seed in range(4)]
    past = OwnPast("linear", extrapolated=extrapolated)
    past.remember(steps[0], continues=False)
    for number in (1, 2, 3):
        old = steps[number - 1]
        held = old + 0.7 * (old - steps[number - 2]) if extrapolated and number > 1 else old
        want = fitted("linear", steps[number], held, old)
        got = past.fit(steps[number], torch.tensor(0.7))
        assert torch.allclose(got, want, atol=1e-5)


def test_a_new_image_has_no_line() -> None:
    first, second, other = (noise(seed) for seed in range(3))
    past = OwnPast("affine", extrapolated=True)
    for step, continues in ((first, False), (second, True), (other, False)):
        past.remember(step, continues=continues)
    assert torch.equal(past.fit(first, torch.ones(())), fitted("affine", first, other, other))


def test_samples_stay_where_they_are() -> None:
    """So that a recorded step finds them there."""
    past = OwnPast("affine", extrapolated=True)
    past.remember(noise(0), continues=False)
    where = [x.data_ptr() for x in past.tensors()]
    past.fit(noise(1), torch.ones(()))
    past.remember(noise(2), continues=True)
    assert [x.data_ptr() for x in past.tensors()] == where
    assert len(where) == 4


def test_nothing_is_kept_for_no_correction() -> None:
    past = OwnPast("none", extrapolated=True)
    past.remember(noise(0), continues=False)
    assert not list(past.tensors())


def test_an_unknown_correction_is_refused() -> None:
    with pytest.raises(PlanError, match=r"correction='quadratic': use affine, linear, none"):
        FreshEdges(correction="quadratic")
