"""What a call of the denoiser answers, by definition: patches by the plain denoiser, led and put together."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from patchpar.errors import PlanError, UnsupportedModel
from patchpar.plan.mesh import Axis
from patchpar.plan.step_clock import StepClock
from patchpar.strategies.structure.denoiser import HighResDenoiser
from patchpar.strategies.structure.interlace import Interlace
from patchpar.strategies.structure.noise_level import NoiseLevel, level_of
from patchpar.strategies.structure.options import StructureGuidance
from patchpar.strategies.structure.structure import Guidance, LaggedTarget, StructureTarget, guided
from tests.tensors import noise
from tests.tiny import Tiny, build

EARLY, LATE = torch.tensor(801), torch.tensor(201)
TEXT = 77


@pytest.fixture(scope="module")
def tiny() -> Tiny:
    return build("sd")


@pytest.fixture(scope="module")
def sdxl() -> Tiny:
    return build("sdxl")


def text(batch: int) -> Tensor:
    return noise(batch, TEXT, 32, seed=1)


def large(tiny: Tiny, **options: Any) -> HighResDenoiser:
    """Alone, for patches of 8 x 8 latents."""
    strategy = StructureGuidance(**{"native": 64, "switch": 0.5, "structure_strength": 0.0} | options)
    return strategy.install(tiny.denoiser, None, Axis("patch"), pipe=tiny.pipe)  # type: ignore[arg-type]


@torch.no_grad()
def both(tiny: Tiny, found: HighResDenoiser, x: Tensor, time: Tensor) -> tuple[Tensor, Any]:
    """What is answered, and a function that asks the plain denoiser."""
    words = text(len(x))
    answer = found.denoise(tiny.denoiser.forward, x, time, encoder_hidden_states=words, return_dict=False)[0]

    @torch.no_grad()
    def ask(patch: Tensor) -> Tensor:
        return tiny.denoiser(patch, time, encoder_hidden_states=words, return_dict=False)[0]

    return answer, ask


def test_patches_that_nobody_leads(tiny: Tiny) -> None:
    """Without guidance the prediction of every phase is the plain denoiser's."""
    x = noise(2, 4, 16, 16)
    answer, ask = both(tiny, large(tiny, weight=0.0), x, EARLY)
    for row in range(2):
        for column in range(2):
            phase = (..., slice(row, None, 2), slice(column, None, 2))
            assert torch.allclose(answer[phase], ask(x[phase]), atol=1e-5)


def test_patches_that_only_follow(tiny: Tiny) -> None:
    """With all its weight every patch's estimate of the clean latent is the anchor's; the anchor stays its own."""
    x = noise(2, 4, 16, 16)
    answer, ask = both(tiny, large(tiny, weight=1.0, align_samples=False), x, EARLY)
    level = level_of(tiny.pipe.scheduler, EARLY)
    anchor = level.clean(x[..., ::2, ::2], ask(x[..., ::2, ::2]))
    clean = level.clean(x, answer)
    assert torch.allclose(answer[..., ::2, ::2], ask(x[..., ::2, ::2]), atol=1e-5)
    assert torch.allclose(clean[..., 1::2, 1::2], anchor, atol=1e-3)
    alone, _ = both(tiny, large(tiny, weight=0.0), x, EARLY)
    assert (level.clean(x, alone)[..., 1::2, 1::2] - anchor).abs().max() > 1e-2


def test_the_paper_pulls_noise_together(tiny: Tiny) -> None:
    """Equation 3: e + w (e_anchor - e)."""
    x = noise(2, 4, 16, 16)
    options = {"space": "eps", "align_samples": False, "decay": "none", "weight": 0.3}
    answer, ask = both(tiny, large(tiny, **options), x, EARLY)
    anchor, other = ask(x[..., ::2, ::2]), ask(x[..., 1::2, ::2])
    assert torch.allclose(answer[..., 1::2, ::2], other + 0.3 * (anchor - other), atol=1e-5)


def test_the_weight_falls_to_nothing_at_the_switch() -> None:
    """By a cosine, from the first step on."""
    falling = Guidance(weight=0.8, decay="cosine")
    assert [falling.strength(progress) for progress in (0.0, 0.5, 1.0)] == pytest.approx([0.8, 0.4, 0.0])


def test_a_target_is_one_step_old_or_fresh() -> None:
    clock, fields = StepClock(), [noise(1, 4, 8, 8, seed=seed) for seed in range(3)]
    target = LaggedTarget[Tensor](clock, 1, lambda each: each.shape)
    assert target.of(fields[0]) is fields[0]
    clock.tick()
    assert target.of(fields[1]) is fields[0]
    clock.tick()
    clock.tick()
    assert target.of(fields[2]) is fields[2]  # the one before is of two steps ago


def test_the_anchor_is_not_moved_to_its_own_past() -> None:
    interlace, level = Interlace((16, 16), (2, 2)), NoiseLevel(time=0.6, signal=0.8, noise=0.6, predicts="epsilon")
    x, predictions, past = noise(4, 1, 4, 8, 8), noise(4, 1, 4, 8, 8, seed=1), noise(1, 4, 8, 8, seed=2)
    moved = guided(Guidance(), level, interlace, StructureTarget(field_BChw=past), (x, predictions), 1.0)
    assert torch.equal(moved[0], predictions[0])
    assert not torch.allclose(moved[1], predictions[1])


def test_windows(tiny: Tiny) -> None:
    """Below the switch corners, which one window alone sees, are the plain denoiser's answer to that window."""
    x = noise(2, 4, 16, 16)
    answer, ask = both(tiny, large(tiny), x, LATE)
    assert torch.allclose(answer[..., :2, :2], ask(x[..., :8, :8])[..., :2, :2], atol=1e-5)
    assert torch.allclose(answer[..., -2:, :2], ask(x[..., -8:, :8])[..., -2:, :2], atol=1e-5)
    level = level_of(tiny.pipe.scheduler, LATE)
    kept, _ = both(tiny, large(tiny, structure_strength=1.0), x, LATE)
    anchor = level.clean(x[..., ::2, ::2], ask(x[..., ::2, ::2]))
    strength = 0.201 / 0.5
    towards = level.clean(x, answer)[..., ::2, ::2] * (1 - strength) + strength * anchor
    assert torch.allclose(level.clean(x, kept)[..., ::2, ::2], towards, atol=1e-4)


def test_a_patch_is_told_that_it_is_an_image_of_its_size(sdxl: Tiny) -> None:
    """Unless the caller chose the sizes; the paper's windows are told their corner instead."""
    reported: list[Tensor] = []

    def forward(sample: Tensor, timestep: Tensor, **kwargs: Any) -> tuple[Tensor]:
        reported.append(kwargs["added_cond_kwargs"]["time_ids"])
        return (sample,)

    def ask(time: Tensor, sizes: list[int], **options: Any) -> list[list[float]]:
        reported.clear()
        found = large(sdxl, **options)
        ids = {"time_ids": torch.tensor([sizes, sizes], dtype=torch.float32)}
        found.denoise(forward, noise(1, 4, 16, 16).repeat(2, 1, 1, 1), time, added_cond_kwargs=ids)
        return [each[0].tolist() for each in reported]

    whole = [128, 128, 0, 0, 128, 128]
    assert ask(EARLY, whole)[0] == [64, 64, 0, 0, 64, 64]
    assert ask(EARLY, [1024, 1024, 0, 0, 128, 128])[0] == [1024, 1024, 0, 0, 64, 64]
    assert ask(LATE, whole)[8] == [64, 64, 0, 0, 64, 64]
    assert ask(EARLY, whole, size_conditioning="whole")[0] == whole
    assert ask(LATE, whole, size_conditioning="whole")[8] == [128, 128, 64, 64, 128, 128]


def test_the_form_of_an_output_stays(tiny: Tiny) -> None:
    found, x = large(tiny), noise(2, 4, 16, 16)
    output = found.denoise(tiny.denoiser.forward, x, EARLY, encoder_hidden_states=text(2))
    assert type(output).__name__ == "UNet2DConditionOutput"
    assert output.sample.shape == x.shape


def test_what_is_refused(tiny: Tiny) -> None:
    """Each with the figure and the way out."""

    def ask(x: Tensor, **kwargs: Any) -> None:
        large(tiny).denoise(tiny.denoiser.forward, x, EARLY, encoder_hidden_states=text(2), **kwargs)

    with pytest.raises(PlanError, match=r"80 x 80 pixels are less than 1\.42 times the native size of 64 x 64: plain"):
        ask(noise(2, 4, 10, 10))
    with pytest.raises(UnsupportedModel, match="of one image"):
        ask(noise(2, 4, 3, 16, 16))
    with pytest.raises(UnsupportedModel, match="mid_block_additional_residual"):
        ask(noise(2, 4, 16, 16), mid_block_additional_residual=noise(2, 32, 4, 4))
    found = large(tiny)
    found.axis = Axis("patch", 0, 10, tuple(range(10)))
    with pytest.raises(PlanError, match="10 ranks, but this size is 4 patches and then 9 windows of 1 guidance"):
        found.denoise(tiny.denoiser.forward, noise(2, 4, 16, 16), EARLY, encoder_hidden_states=text(2))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"space": "v"}, "space='v': use None, x0, eps"),
        ({"switch": 0.0}, "switch=0: windows run below it"),
        ({"weight": 2.0}, "weight=2.0: it is a number from 0 to 1"),
        ({"overlap": None}, "overlap=None: it is a number from 0 to 0.9"),  # no preset has a value for these
        ({"context": None}, "context=None: it is a number from 0 to 1"),
        ({"lag": 2}, "lag=2: use 0, 1"),
        ({"native": 3}, "native=3: it is a side in pixels"),
    ],
)
def test_options_that_cannot_be(options: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        StructureGuidance(**options)


def test_nothing_is_left_behind(tiny: Tiny) -> None:
    before = {name: set(vars(part)) for name, part in tiny.pipe.components.items() if part is not None}
    own = set(vars(tiny.pipe))
    hooks = [len(module._forward_pre_hooks) for module in tiny.pipe.text_encoder.modules()]
    found = large(tiny, preset="paper", renoised=True)
    found.reset()
    assert "prepare_latents" in vars(tiny.pipe)
    found.finish()
    found.restore()
    assert {name: set(vars(part)) for name, part in tiny.pipe.components.items() if part is not None} == before
    assert set(vars(tiny.pipe)) == own
    assert [len(module._forward_pre_hooks) for module in tiny.pipe.text_encoder.modules()] == hooks
