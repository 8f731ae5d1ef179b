import argparse
import random
from itertools import islice

import numpy as np
import pytest
import torch
from PIL import Image

from patchpar.models.streaming.causal.audio_conditioner import audio_levels
from patchpar.models.streaming.causal.causal_wan import BlockAudio, BlockInputs, CausalWan
from patchpar.models.streaming.config import CausalOptions, StreamConfig
from patchpar.stream.causal.pipeline import StreamingPipeline
from training import package
from training.checkpoint import load, save
from training.evaluate_face import Talk, avatar_of, frames_of, packaged_avatar
from training.face import OPTIONS, SIDE, TEXT_TOKENS, ClipTraining, FaceNetworks
from training.face_data import (
    AUDIO,
    PROMPTS,
    SCHEDULE,
    ClipShape,
    openings,
    prompt_of,
    sample_batch,
    sample_clip,
    sample_levels,
    speaking_mask,
)
from training.face_measure import correlation, identity_error, moods_of, mouth_opening
from training.face_vae import clip_latents, clip_pixels, decode, new_face_vae
from training.faces import MOODS, Pose, render_face, sample_identity
from training.package_face import STREAM, assemble, averaged_face, write_face
from training.speech import RATE, speech
from training.train_face import SHORT, batches, loss_of, new_face_run, start_from_face, train_step
from training.train_face_vae import clip_lesson

SHAPE = ClipShape(side=48, blocks=2, frames=OPTIONS.frames)


def fresh_run():
    torch.manual_seed(0)
    return new_face_run(torch.device("cpu"))


def steps(run, keys):
    training = ClipTraining(run.networks)
    return [train_step(run, sample_batch(key, SHAPE, 2), 1e-3, training) for key in keys]


@pytest.fixture(scope="module")
def networks():
    """Networks whose ears are not deaf, as fresh ones are."""
    torch.manual_seed(0)
    made = FaceNetworks().eval().requires_grad_(False)
    for layer in made.audio.layers.values():
        torch.nn.init.normal_(layer.to_out.weight, std=0.1)
    return made


def test_a_key_is_a_clip_and_another_key_another_one():
    one, again, other = (sample_clip(key, SHAPE) for key in ("a", "a", "b"))
    assert np.array_equal(one.frames, again.frames)
    assert torch.equal(one.audio, again.audio)
    assert one.moods == again.moods
    assert not np.array_equal(one.frames, other.frames)
    assert one.frames.shape == (6, 48, 48, 3)
    assert one.audio.shape == (6, AUDIO.tokens, AUDIO.levels)


def test_the_same_face_is_rendered_at_every_size():
    identity, pose = sample_identity(random.Random(1)), Pose(opening=0.7, dx=1)
    large, small = (render_face(identity, pose, side=side).astype(float) for side in (96, 48))
    shrunk = large.reshape(48, 2, 48, 2, 3).mean((1, 3))
    assert np.abs(shrunk - small).mean() < 3


def test_the_opening_of_a_rendered_mouth_can_be_measured():
    rng = random.Random("opening")
    wanted = np.array([rng.random() for _ in range(40)])
    for number in range(3):
        identity = sample_identity(random.Random(number))
        poses = [Pose(opening=a, spread=rng.random(), dx=rng.uniform(-2, 2), dy=rng.uniform(-2, 1)) for a in wanted]
        measured = mouth_opening(np.stack([render_face(identity, pose, side=96) for pose in poses]))
        assert correlation(measured, wanted) > 0.97
        assert correlation(measured, wanted, lag=1) < 0.5
        shuffled = np.random.default_rng(0).permutation(wanted)
        assert correlation(measured, shuffled) < 0.5


def test_a_correlation_knows_which_one_is_late():
    early = np.random.default_rng(0).random(50)
    late = np.concatenate([[0, 0], early[:-2]])
    assert correlation(late, early, lag=2) == pytest.approx(1)
    assert correlation(early, late, lag=-2) == pytest.approx(1)
    assert abs(correlation(late, early)) < 0.4
    assert correlation(np.ones(50), early) == 0


def test_colours_tell_one_person_from_another():
    one, other = (sample_identity(random.Random(number)) for number in (1, 2))
    reference, moved = (render_face(one, pose, side=96) for pose in (Pose(), Pose(opening=0.8, dx=2, dy=-2)))
    assert max(identity_error(moved[None], reference).values()) < 12
    strange = identity_error(render_face(other, Pose(), side=96)[None], reference)
    assert max(strange.values()) > 30


def test_moods_are_read_from_rendered_faces():
    clip = sample_clip("moods", ClipShape(side=96, blocks=12, frames=3))
    asked = [*clip.moods]
    assert (
        np.mean([seen == mood for seen, mood in zip(moods_of(clip.frames, clip.identity), asked, strict=True)]) > 0.95
    )
    for mood in MOODS:
        frames = np.stack([render_face(clip.identity, Pose(mood=mood, opening=0.5, dx=1, dy=-1), side=96)])
        assert moods_of(frames, clip.identity) == [mood]


def test_speech_has_syllables_and_pauses():
    samples = speech("a", 4 * RATE)
    assert np.array_equal(samples, speech("a", 4 * RATE))
    assert not np.array_equal(samples, speech("b", 4 * RATE))
    opened = torch.cat([openings(audio_levels(torch.from_numpy(speech(str(i), 4 * RATE)), AUDIO)) for i in range(5)])
    assert (opened < 0.1).float().mean() > 0.1
    assert (opened > 0.5).float().mean() > 0.1


def test_mouths_follow_their_own_audio():
    clip = sample_clip("long", ClipShape(side=96, blocks=12, frames=3))
    assert correlation(mouth_opening(clip.frames), clip.openings.numpy()) > 0.95
    assert torch.allclose(openings(clip.audio[:, -1]), clip.openings)


def test_levels_of_noise_are_those_of_the_steps_or_any():
    levels = sample_levels(4000, 3, torch.Generator().manual_seed(0))
    assert 0 <= levels.min() <= levels.max() <= 1
    staged = torch.isin(levels, torch.tensor(SCHEDULE.sigmas[:-1])).all(1)
    alike = (levels == levels[:, :1]).all(1)
    assert staged.float().mean() == pytest.approx(0.5, abs=0.05)
    assert alike.float().mean() == pytest.approx(0.75, abs=0.05)
    parts = [(levels[staged, 0] == sigma).float().mean().item() for sigma in SCHEDULE.sigmas[:-1]]
    assert parts == pytest.approx([0.25] * 4, abs=0.05)


def test_the_mask_lies_over_what_moves():
    identity = sample_identity(random.Random(3))
    rest, moved = (render_face(identity, pose, side=96) for pose in (Pose(), Pose(opening=1, lids=1, mood="angry")))
    changed = torch.from_numpy(np.abs(rest.astype(int) - moved).sum(-1) > 0)
    assert changed.any()
    mask = speaking_mask(96)[0, 0].repeat_interleave(4, 0).repeat_interleave(4, 1)
    assert not (changed & (mask == 0)).any()
    assert mask.mean() < 0.4


def clip_and_stream(networks, stream_options):
    """Velocities of a clip as it is trained, and block by block as it is streamed."""
    batch = sample_batch("stream", ClipShape(side=SIDE, blocks=4, frames=OPTIONS.frames), 1)
    noisy = torch.lerp(batch.latent, batch.noise, 0.5)
    text = networks.prompts()
    causal = CausalWan(networks.transformer, stream_options, networks.audio)
    memory = causal.memory(*noisy.shape[3:])
    causal.remember_sink(memory, batch.reference, text[batch.sink_mood])
    streamed = []
    for block in range(4):
        part = slice(block * OPTIONS.frames, (block + 1) * OPTIONS.frames)
        timestep, words = 1000 * batch.level[0, block].item(), text[batch.moods[:, block]]
        audio = BlockAudio(batch.audio[:, part])
        streamed.append(causal.velocity(memory, noisy[:, :, part], words, BlockInputs(block, timestep, audio)))
    causal.restore()
    training = ClipTraining(networks)
    trained = training.velocity(noisy, batch)
    training.remove()
    return trained, torch.cat(streamed, 2)


def test_training_sees_what_a_stream_sees(networks):
    trained, streamed = clip_and_stream(networks, OPTIONS)
    assert torch.allclose(trained, streamed, atol=2e-4)


@pytest.mark.parametrize("change", [{"window": 2}, {"sink_distance": 5}])
def test_training_sees_nothing_else(networks, change):
    settings = {"frames": OPTIONS.frames, "window": OPTIONS.window, "sink_distance": OPTIONS.sink_distance, **change}
    trained, streamed = clip_and_stream(networks, CausalOptions(**settings))
    assert not torch.allclose(trained, streamed, atol=2e-4)


def test_a_flow_points_from_the_image_to_the_noise():
    batch = sample_batch("flow", SHAPE, 2)

    class Answer:
        options = OPTIONS

        def __init__(self, factor):
            self.scale = factor

        def velocity(self, noisy, batch):
            return self.scale * (batch.noise - batch.latent)

    assert loss_of(Answer(1), batch).item() == pytest.approx(0)
    assert loss_of(Answer(-1), batch).item() == pytest.approx(4 * loss_of(Answer(0), batch).item(), rel=1e-5)


@pytest.mark.breadth  # test_training.py holds it for the other recipe
def test_training_goes_on_from_its_state_as_if_it_had_not_stopped(tmp_path):
    straight, stopped = fresh_run(), fresh_run()
    steps(straight, "ab")
    steps(stopped, "a")
    save(stopped, tmp_path / "state.pt")
    resumed = new_face_run(torch.device("cpu"))
    load(resumed, tmp_path / "state.pt")
    steps(resumed, "b")
    assert resumed.progress == straight.progress
    for name, value in straight.networks.named_parameters():
        assert torch.equal(value, resumed.networks.get_parameter(name)), name
    for name, value in straight.average.items():
        assert torch.equal(value, resumed.average[name]), name


@pytest.mark.breadth  # training is not part of the package
def test_everything_is_trained_and_the_loss_falls():
    run = fresh_run()
    before = {name: value.clone() for name, value in run.networks.named_parameters()}
    first, *_, last = steps(run, ["same"] * 10)
    assert last["loss"] < 0.9 * first["loss"]
    same = {name for name, value in run.networks.named_parameters() if torch.equal(value, before[name])}
    assert same == set()
    assert {name.split(".")[0] for name in run.average} == {"transformer", "audio", "text_encoder"}


def test_batches_go_on_where_they_stopped():
    arguments = argparse.Namespace(seed=0, steps=6, batch_scale=0.1)
    run = fresh_run()
    generated = [batch.noise for batch in islice(batches(run, SHORT, arguments, None), 3)]
    run.progress.step = run.progress.stage_step = 2
    (later,) = (batch.noise for batch in islice(batches(run, SHORT, arguments, None), 1))
    assert torch.equal(later, generated[2])
    assert generated[0].shape != generated[1].shape or not torch.equal(generated[0], generated[1])


def test_prompts_are_what_the_pipeline_makes_of_them(networks):
    pipe = assemble(networks, new_face_vae())
    wanted = pipe.encode_prompt(list(PROMPTS), do_classifier_free_guidance=False, max_sequence_length=TEXT_TOKENS)[0]
    assert torch.allclose(networks.prompts(), wanted, atol=1e-5)
    calm, happy, *_ = wanted
    assert not torch.allclose(calm, happy, atol=1e-3)


def test_the_autoencoder_decodes_a_clip_as_it_was_trained_to():
    torch.manual_seed(0)
    vae = new_face_vae().eval()
    latent = clip_latents(clip_pixels("vae", ClipShape(side=24, blocks=1, frames=4))[None])
    with torch.no_grad():
        assert torch.allclose(decode(vae, latent).clamp(-1, 1), vae.decode(latent).sample, atol=1e-5)
        assert vae.encode(torch.zeros(1, 3, 1, 24, 24)).latent_dist.mode().shape == (1, 4, 1, 6, 6)


@pytest.mark.breadth  # training is not part of the package
def test_the_autoencoder_learns():
    torch.manual_seed(0)
    vae = new_face_vae()
    optimizer = torch.optim.AdamW(vae.parameters(), lr=1e-3)
    losses = []
    for _ in range(3):
        loss = clip_lesson(vae, 4, torch.Generator().manual_seed(0), 0)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]


@pytest.mark.breadth  # tests/stream streams the packaged model
def test_the_average_is_packaged_streams_and_is_a_start(tmp_path):
    run = fresh_run()
    steps(run, "ab")
    save(run, tmp_path / "state.pt")
    size = write_face(averaged_face(tmp_path / "state.pt"), new_face_vae(), tmp_path / "model")
    assert size <= package.LIMIT_BYTES
    again = fresh_run()
    start_from_face(again, tmp_path / "model")
    for name, value in run.average.items():
        assert torch.allclose(again.average[name], value, atol=1e-3), name
        assert torch.equal(again.networks.get_parameter(name), again.average[name]), name
    identity = sample_identity(random.Random(0))
    talk = Talk(identity=identity, mood="calm", samples=speech("a", RATE // 2), seed=0)
    frames = frames_of(packaged_avatar(tmp_path / "model"), talk, talk.levels)
    assert frames.shape == (6, SIDE, SIDE, 3)
    assert frames.std() > 0
    assert StreamConfig.load(tmp_path / "model") == STREAM
    options = {"devices": 1, "variant": "fp16", "torch_dtype": torch.float32}
    with StreamingPipeline.from_pretrained(tmp_path / "model", **options) as pipe:
        heard = (torch.from_numpy(talk.samples), RATE)
        with pipe.stream(
            prompt_of(talk.mood), reference=Image.fromarray(talk.reference), audio=heard, seed=talk.seed
        ) as session:
            streamed = np.concatenate([np.asarray(chunk.frames) for chunk in session])
    assert np.array_equal(streamed[: len(frames)], frames)
    own = frames_of(avatar_of(averaged_face(tmp_path / "state.pt"), new_face_vae().eval()), talk, talk.levels)
    assert own.shape == frames.shape
