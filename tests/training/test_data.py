import random

import numpy as np
import pytest
import torch

from training.batches import key_at_time, sample_batch, sample_example
from training.classifier import judge, load_classifier
from training.latents import object_mask, to_latent, to_tensor
from training.render import render, sample_render, scene_of
from training.repeats import load_counter, repeats, sample_repeated
from training.scenes import (
    COLORLESS,
    SIDES,
    Item,
    Scene,
    caption,
    flipped,
    held_out_captions,
    is_held_out,
    look_of,
    sample_scene,
    vocabulary,
)
from training.stages import Bucket, Schedule
from training.tokenizer import MAX_TOKENS, build_tokenizer

SIZES = [(256, 256), (256, 384), (384, 256), (512, 512)]


@pytest.fixture(scope="module")
def classifier():
    return load_classifier()


@pytest.fixture(scope="module")
def counter():
    return load_counter()


def test_a_seed_decides_the_image():
    one, again, other = (sample_render(seed, height=64, width=96) for seed in (3, 3, 4))
    assert np.array_equal(one.pixels, again.pixels)
    assert one.caption == again.caption
    assert not np.array_equal(one.pixels, other.pixels)
    assert one.pixels.shape == (64, 96, 3)


@pytest.mark.parametrize("seed", [1, 2])
def test_one_seed_is_one_scene_at_every_resolution(seed):
    small, large = (sample_render(seed, height=side, width=side) for side in (128, 512))
    assert small.caption == large.caption
    shrunk = torch.nn.functional.avg_pool2d(to_tensor(large.pixels), 4)
    assert (shrunk - to_tensor(small.pixels)).abs().mean() < 0.02


def test_captions_say_what_is_where():
    scene = Scene(
        time="at noon",
        terrain="green hills",
        items=(
            Item(kind="balloon", color="orange", side="left"),
            Item(kind="pine", color=None, side="right"),
        ),
    )
    assert caption(scene) == "an orange balloon on the left and a pine on the right, green hills at noon"
    assert caption(scene, right_first=True).startswith("a pine on the right and an orange balloon on the left")
    assert caption(flipped(scene)) == "a pine on the left and an orange balloon on the right, green hills at noon"
    assert flipped(flipped(scene)) == scene


def test_held_out_scenes_are_never_trained_on_not_even_mirrored():
    rng = random.Random(0)
    trained = [sample_scene(rng) for _ in range(300)]
    assert not any(is_held_out(scene) or is_held_out(flipped(scene)) for scene in trained)
    kept = [scene for _, scene in held_out_captions(64)]
    assert all(is_held_out(scene) and is_held_out(flipped(scene)) for scene in kept)
    assert len({words for words, _ in held_out_captions(64)}) == 64
    assert held_out_captions(8) == held_out_captions(64)[:8]


def test_too_many_held_out_captions_are_refused():
    with pytest.raises(ValueError, match="ask for fewer"):
        held_out_captions(5000)


@pytest.mark.parametrize(("height", "width"), SIZES)
def test_renders_show_their_attributes_at_every_aspect(classifier, height, width):
    displayed = [sample_render(f"test {seed}", height=height, width=width, held_out=True) for seed in range(12)]
    verifications = judge(classifier, torch.cat([to_tensor(one.pixels) for one in displayed]))
    for judgement, one in zip(verifications, displayed, strict=True):
        assert [judgement.on(side) for side in SIDES] == [look_of(one.scene.on(side)) for side in SIDES]
        assert (judgement.terrain, judgement.time) == (one.scene.terrain, one.scene.time)


def test_the_classifier_sees_a_wrong_side(classifier):
    scene = Scene(time="at noon", terrain="desert dunes", items=(Item(kind="house", color="red", side="left"),))
    mirrored = render(flipped(scene), random.Random(0), height=128, width=128)
    judgement = judge(classifier, to_tensor(mirrored.pixels))[0]
    assert (judgement.left, judgement.right) == (None, ("house", "red"))


def test_mirrored_training_images_have_mirrored_captions(classifier):
    captions = {}
    for index in range(24):
        sample, source = sample_example(f"flip {index}", 32, 32), sample_render(f"flip {index}", height=128, width=128)
        latent = to_latent(to_tensor(source.pixels))[0]
        mirrored = not torch.equal(sample.latent, latent)
        captions.setdefault(mirrored, []).append(sample.caption)
        assert torch.equal(sample.latent, latent.flip(-1) if mirrored else latent)
        scene = flipped(source.scene) if mirrored else source.scene
        assert sample.caption in (caption(scene), caption(scene, right_first=True))
    assert set(captions) == {True, False}


def test_the_tokenizer_has_one_token_for_every_word():
    tokenizer = build_tokenizer()
    assert all(len(tokenizer(word).input_ids) == 3 for word in vocabulary())
    rng = random.Random(1)
    for _ in range(100):
        words = caption(sample_scene(rng))
        ids = tokenizer(words).input_ids
        assert len(ids) == len(words.replace(",", " ,").split()) + 2 <= MAX_TOKENS
        assert tokenizer.unk_token_id not in ids[1:-1]
    assert len(tokenizer("zebra").input_ids) > 3


def test_latents_mean_what_they_say():
    flat = torch.tensor([0.5, -0.25, 1.0]).view(1, 3, 1, 1).expand(1, 3, 8, 8)
    latent = to_latent(flat)
    assert torch.allclose(latent[0, :3, 0, 0], torch.tensor([1.0, -0.5, 2.0]))
    assert torch.allclose(latent[:, 3], torch.full((1, 2, 2), -0.5), atol=1e-2)
    stripes = torch.ones(1, 3, 8, 8)
    stripes[..., ::2] = -1
    assert torch.allclose(to_latent(stripes)[:, 3], torch.full((1, 2, 2), 7.5))


def test_the_object_mask_covers_the_object_and_little_else():
    displayed = sample_render("mask", height=256, width=256)
    mask = object_mask(displayed)
    assert mask.shape == (1, 64, 64)
    assert 0.01 < mask.mean() < 0.4
    left, top, right, bottom = displayed.boxes[0]
    assert mask[0, int((top + bottom) / 8), int((left + right) / 8)] == 1


def test_batches_are_decided_by_their_key():
    bucket = Bucket(height=8, width=12, batch=6, fraction=1)
    one, again, other = (sample_batch(key, bucket, build_tokenizer()) for key in ("a", "a", "b"))
    assert torch.equal(one.noise, again.noise)
    assert torch.equal(one.latent, again.latent)
    assert not torch.equal(one.noise, other.noise)
    assert one.latent.shape == (6, 4, 8, 12)
    assert one.timestep.min() >= 0
    assert one.timestep.max() <= 999


def test_as_many_scenes_are_at_night_as_asked_for():
    keys = [key_at_time(f"share {index}", 0.75) for index in range(400)]
    at_night = sum(scene_of(key).time == "at night" for key in keys) / len(keys)
    assert at_night == pytest.approx(0.75, abs=0.06)
    assert all(scene_of(key_at_time(f"all {index}", 1.0)).time == "at night" for index in range(20))
    assert key_at_time("any", None) == "any"
    bucket = Bucket(height=8, width=8, batch=24, fraction=1)
    dark, bright = (
        sample_batch("a", bucket, build_tokenizer(), night_fraction=fraction).latent for fraction in (1.0, 0.0)
    )
    assert dark[:, :3].mean() < bright[:, :3].mean() - 0.5


def test_repeated_objects_are_counted(counter):
    images, sides = zip(
        *(sample_repeated(f"test {index}", height=256, width=256, held_out=True) for index in range(40)), strict=True
    )
    right = [found == asked for found, asked in zip(repeats(counter, torch.cat(images)), sides, strict=True)]
    assert sum(right) >= 37
    assert len(set(sides)) == 4


@pytest.mark.parametrize("side", SIDES)
def test_a_twin_is_beside_its_object_and_nowhere_else(side):
    scene = Scene(
        time="at noon",
        terrain="desert dunes",
        items=tuple(Item(kind="house", color="red", side=one) for one in SIDES),
    )
    once, twice = (render(scene, random.Random(3), height=128, width=128, repeated=sides) for sides in ((), {side}))
    changed = (once.pixels != twice.pixels).any(-1).any(0)
    halves = {"left": changed[:50], "right": changed[-50:]}
    assert halves.pop(side).any()
    if side == "right":  # what is drawn before a twin has the same place
        assert not halves["left"].any()


def test_the_learning_rate_rises_stays_and_falls():
    schedule = Schedule(steps=1000, peak=1.0, rise=10, decay_from=0.5)
    assert schedule.rate(0) == pytest.approx(0.1)
    assert schedule.rate(300) == 1.0
    assert schedule.rate(750) == pytest.approx(0.5)
    assert schedule.rate(999) == pytest.approx(0.02)


def test_colorless_kinds_have_no_color():
    rng = random.Random(2)
    items = [item for _ in range(200) for item in sample_scene(rng).items]
    assert all((item.color is None) == (item.kind in COLORLESS) for item in items)
