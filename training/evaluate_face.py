"""How well the avatar speaks: its mouth against the audio of held-out talks, and its colours against the reference.

    python -m training.evaluate_face                                      # the packaged avatar, 8 talks of 6 seconds
    python -m training.evaluate_face --sheet assets/figures/samples-face.png
    python -m training.evaluate_face --face runs/face.pt --vae runs/face_vae.pt --talks 2    # a run in between

Faces and speech come from keys that training never draws. `shuffled` is the same with the audio of other moments: a
mouth that moves by itself would score there too.
"""

from __future__ import annotations

import argparse
import json
import random
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from diffusers import AutoencoderKLWan, WanPipeline
from PIL import Image
from torch import Tensor

from patchpar.models.streaming.causal.audio_conditioner import AudioConditioner, audio_levels, latent_tokens
from patchpar.models.streaming.causal.causal_wan import CausalWan
from patchpar.models.streaming.decoder import WanDecoder, from_pixels
from patchpar.stream.causal.wan import WanStream
from patchpar.stream.events import StepConditions
from patchpar.stream.messages import StreamRun
from training.face import OPTIONS, SIDE, TEXT_TOKENS, FaceNetworks
from training.face_data import AUDIO, FPS, SCHEDULE, openings, prompt_of
from training.face_measure import correlation, identity_error, moods_of, mouth_opening
from training.face_vae import new_face_vae
from training.faces import MOODS, Identity, Pose, render_face, sample_identity
from training.package_face import FACE_FOLDER, STREAM, assemble, averaged_face, trained_face_vae
from training.speech import RATE, speech

LAGS = range(-3, 4)


@dataclass(frozen=True, slots=True, kw_only=True)
class Avatar:
    """The networks of an avatar, ready to stream."""

    causal: CausalWan
    vae: AutoencoderKLWan
    pipe: WanPipeline

    def text(self, prompt: str) -> Tensor:
        """Embeddings (1, T, width) of a prompt."""
        kept = {"do_classifier_free_guidance": False, "max_sequence_length": TEXT_TOKENS}
        return self.pipe.encode_prompt(prompt, **kept)[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Talk:
    """What is to be said by whom and in which mood: samples (N,) at RATE, and the seed of the noise."""

    identity: Identity
    mood: str
    samples: np.ndarray
    seed: int

    @property
    def reference(self) -> np.ndarray:
        """The image (H, W, 3) uint8 that the avatar is shown: at rest and calm."""
        return render_face(self.identity, Pose(), side=SIDE)

    @property
    def levels(self) -> Tensor:
        """Sound levels (P, C) per frame."""
        return audio_levels(torch.from_numpy(self.samples), AUDIO)


def avatar_of(networks: FaceNetworks, vae: AutoencoderKLWan) -> Avatar:
    """Make the networks block-causal."""
    pipe = assemble(networks, vae)
    return Avatar(causal=CausalWan(networks.transformer, OPTIONS, networks.audio), vae=vae, pipe=pipe)


def packaged_avatar(folder: Path = FACE_FOLDER) -> Avatar:
    """The avatar of a folder, in single precision."""
    pipe = WanPipeline.from_pretrained(folder, variant="fp16", torch_dtype=torch.float32)
    causal = CausalWan(pipe.transformer, OPTIONS, AudioConditioner.load(folder / "transformer").float())
    return Avatar(causal=causal, vae=pipe.vae, pipe=pipe)


def held_out_talk(number: int, seconds: float) -> Talk:
    """A face and speech that training never sees."""
    return Talk(
        identity=sample_identity(random.Random(f"face held out {number}")),
        mood=MOODS[number % len(MOODS)],
        samples=speech(f"held out {number}", round(seconds * RATE)),
        seed=number,
    )


@torch.no_grad()
def stream_of(avatar: Avatar, talk: Talk) -> WanStream:
    """The model of a talk's stream, which begins with its face and its prompt."""
    decoder = WanDecoder(avatar.vae)
    sink = decoder.encode(from_pixels(torch.from_numpy(talk.reference.copy())[None]))
    run = StreamRun(
        ranks=1,
        seed=talk.seed,
        rows=sink.shape[3],
        columns=sink.shape[4],
        first_block=0,
        adapt_sink=STREAM.adapt_sink,
    )
    first = StepConditions(text=avatar.text(prompt_of(talk.mood)), sink=sink)
    return WanStream(avatar.causal, SCHEDULE, decoder, run, first)


@torch.no_grad()
def frames_of(avatar: Avatar, talk: Talk, levels_PC: Tensor) -> np.ndarray:
    """The frames (F, H, W, 3) uint8 of a talk, by one process, with the audio of these levels; whole blocks only."""
    stream = stream_of(avatar, talk)
    states, memory, made = [stream.new_state(step) for step in range(stream.steps)], stream.new_decoder(), []
    for block in range(len(levels_PC) // OPTIONS.frames):
        latents = range(block * OPTIONS.frames, (block + 1) * OPTIONS.frames)
        payload = stream.begin(block, (latent_tokens(levels_PC, latents, AUDIO)[None],))
        for state in states:
            payload = stream.step(state, block, payload)
        made.append(stream.decode(memory, payload))
    return torch.cat(made).numpy()


def judge(avatar: Avatar, talk: Talk) -> dict[str, float]:
    """Correlations of mouth and loudness by lag and with shuffled audio, share of right moods, errors of colours."""
    levels = talk.levels
    wanted = openings(levels).numpy()
    frames = frames_of(avatar, talk, levels)
    order = np.random.default_rng(talk.seed).permutation(len(levels))
    strange = mouth_opening(frames_of(avatar, talk, levels[order]))
    mouth = mouth_opening(frames)
    count = len(mouth)
    found = {f"lag {lag}": correlation(mouth, wanted[:count], lag) for lag in LAGS}
    found["shuffled"] = correlation(strange, wanted[:count])
    found["mood"] = float(np.mean([mood == talk.mood for mood in moods_of(frames, talk.identity)]))
    errors = identity_error(frames[len(frames) // 2 :], talk.reference)
    return found | {f"{name} error": error for name, error in errors.items()}


def sheet_of(avatar: Avatar, talks: int, *, frames: int = 12) -> Image.Image:
    """One row per talk: the reference, then frames one after another."""
    sheet = Image.new("RGB", ((frames + 1) * SIDE, talks * SIDE))
    for number in range(talks):
        talk = held_out_talk(number, (2 * frames) / FPS)
        displayed = [talk.reference, *frames_of(avatar, talk, talk.levels)[-frames:]]
        for column, pixels in enumerate(displayed):
            sheet.paste(Image.fromarray(pixels), (column * SIDE, number * SIDE))
    return sheet


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=FACE_FOLDER, help="packaged avatar")
    parser.add_argument("--face", type=Path, help="state file of train_face, instead of a packaged avatar")
    parser.add_argument("--vae", type=Path, help="state file of train_face_vae, with --face")
    parser.add_argument("--talks", type=int, default=8, help="how many faces talk")
    parser.add_argument("--seconds", type=float, default=6.0, help="for how long each")
    parser.add_argument("--sheet", type=Path, help="draw a sheet of frames there instead of measuring")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    return parser.parse_args()


def main() -> None:
    """Measure, or draw a sheet."""
    arguments = parse()
    torch.set_num_threads(arguments.threads)
    if arguments.face is None:
        avatar = packaged_avatar(arguments.model)
    else:
        vae = trained_face_vae(arguments.vae) if arguments.vae else new_face_vae().eval()
        avatar = avatar_of(averaged_face(arguments.face), vae)
    if arguments.sheet:
        sheet_of(avatar, min(arguments.talks, 6)).save(arguments.sheet)
        return
    found = [judge(avatar, held_out_talk(number, arguments.seconds)) for number in range(arguments.talks)]
    print(json.dumps({name: round(float(np.mean([one[name] for one in found])), 3) for name in found[0]}, indent=1))


if __name__ == "__main__":
    main()
