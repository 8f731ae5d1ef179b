"""Write the trained avatar as a WanPipeline folder, with its ears beside the transformer and a file on how it streams.

    python -m training.package_face --face runs/face.pt --vae runs/face_vae.pt --output assets/face-stream

`stream.json` says how blocks are cut, which noise levels the denoising steps have, and how long prompts are. Beside it
are a face for streams that are given none, and some speech to try it with, both drawn by code.
"""

from __future__ import annotations

import argparse
import json
import random
import wave
from dataclasses import asdict
from pathlib import Path

import numpy as np
from diffusers import AutoencoderKLWan, FlowMatchEulerDiscreteScheduler, WanPipeline
from PIL import Image

from patchpar.models.streaming.config import CONFIG, StreamConfig
from training.checkpoint import read
from training.face import OPTIONS, SIDE, TEXT_TOKENS, FaceNetworks, build_face_tokenizer
from training.face_data import FPS, PROMPTS, SCHEDULE
from training.face_vae import encode_frames_alone, new_face_vae
from training.faces import Pose, render_face, sample_identity
from training.package import FOLDER, write
from training.speech import RATE, speech

FACE_FOLDER = FOLDER.parent / "face-stream"
REFERENCE, SPEECH, SECONDS = "face.png", "speech.wav", 6
STREAM = StreamConfig(
    sigmas=SCHEDULE.sigmas,
    fps=FPS,
    height=SIDE,
    width=SIDE,
    blocks=OPTIONS,
    text_tokens=TEXT_TOKENS,
    adapt_sink=False,  # the reference is of the kind it was trained with, a frame of its own making is less so
    prompts=tuple(prompt for prompt in PROMPTS if prompt),
    reference=REFERENCE,
)


def averaged_face(checkpoint: Path) -> FaceNetworks:
    """The moving average of a training run's weights."""
    networks, state = FaceNetworks(), read(checkpoint)
    networks.load_state_dict(state["networks"])
    networks.load_state_dict(state["average"], strict=False)
    return networks.eval().requires_grad_(False)


def trained_face_vae(checkpoint: Path) -> AutoencoderKLWan:
    """The autoencoder of a training run."""
    vae = new_face_vae()
    vae.load_state_dict(read(checkpoint)["vae"])
    encode_frames_alone(vae)
    return vae.eval().requires_grad_(False)


def assemble(networks: FaceNetworks, vae: AutoencoderKLWan) -> WanPipeline:
    """The pipeline. Its scheduler takes the four steps of a stream when it is given `sigmas=[1, 0.75, 0.5, 0.25]`."""
    return WanPipeline(
        tokenizer=build_face_tokenizer(),
        text_encoder=networks.text_encoder,
        vae=vae,
        scheduler=FlowMatchEulerDiscreteScheduler(num_train_timesteps=1000, shift=3.0),
        transformer=networks.transformer,
    )


def write_face(networks: FaceNetworks, vae: AutoencoderKLWan, folder: Path) -> int:
    """Save everything; returns the size in bytes. Raises ValueError above the limit of `training.package.write`."""
    write(assemble(networks, vae), folder)
    networks.audio.half().save(folder / "transformer")
    (folder / CONFIG).write_text(json.dumps(asdict(STREAM), indent=2) + "\n")
    write_samples(folder)
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def write_samples(folder: Path) -> None:
    """A face, and speech of one channel in 16 bits, of keys that training never draws."""
    identity = sample_identity(random.Random("packaged face"))
    Image.fromarray(render_face(identity, Pose(), side=SIDE)).save(folder / REFERENCE)
    with wave.open(str(folder / SPEECH), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(RATE)
        file.writeframes((speech("packaged speech", SECONDS * RATE).clip(-1, 1) * 32767).astype(np.int16).tobytes())


def main() -> None:
    """Package as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--face", type=Path, required=True, help="state file of train_face")
    parser.add_argument("--vae", type=Path, required=True, help="state file of train_face_vae")
    parser.add_argument("--output", type=Path, default=FACE_FOLDER)
    arguments = parser.parse_args()
    progress = read(arguments.face)["progress"]
    size = write_face(averaged_face(arguments.face), trained_face_vae(arguments.vae), arguments.output)
    print(f"{arguments.output}: {size / 1e6:.2f} MB after {progress['step']} steps, {progress['samples']} clips")


if __name__ == "__main__":
    main()
