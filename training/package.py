"""Write the trained networks as a diffusers pipeline folder.

    python -m training.package --unet runs/unet.pt --vae runs/vae.pt --output assets/scenes-unet

The folder is built beside its place and moved in file by file, so that whoever loads it meets whole files only.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from pathlib import Path

import torch
from diffusers import AutoencoderKL, DiffusionPipeline, StableDiffusionXLPipeline
from safetensors.torch import load_file, save_file

from training.checkpoint import read
from training.model import Networks, noise_scheduler
from training.tokenizer import build_tokenizer
from training.vae import new_vae

FOLDER = Path(__file__).parent.parent / "assets" / "scenes-unet"
LIMIT_BYTES = 20_000_000
PREFIX = "text_model."


def averaged_networks(checkpoint: Path) -> Networks:
    """The moving average of a training run's weights."""
    networks = Networks()
    networks.load_state_dict(read(checkpoint)["average"], strict=False)
    return networks.eval()


def trained_vae(checkpoint: Path) -> AutoencoderKL:
    """The autoencoder of a training run."""
    vae = new_vae()
    vae.load_state_dict(read(checkpoint)["vae"])
    return vae.eval()


def packaged_vae(folder: Path) -> AutoencoderKL:
    """The autoencoder of a packaged pipeline."""
    vae = new_vae()
    vae.load_state_dict(load_file(folder / "vae/diffusion_pytorch_model.fp16.safetensors"))
    return vae.eval()


def assemble(networks: Networks, vae: AutoencoderKL) -> StableDiffusionXLPipeline:
    """The pipeline. An empty prompt is encoded like any other, because that is what caption dropout trained."""
    tokenizer = build_tokenizer()
    return StableDiffusionXLPipeline(
        vae=vae,
        text_encoder=networks.text_encoder,
        text_encoder_2=networks.text_encoder_2,
        tokenizer=tokenizer,
        tokenizer_2=tokenizer,
        unet=networks.unet,
        scheduler=noise_scheduler(),
        force_zeros_for_empty_prompt=False,
        add_watermarker=False,
    )


def write(pipe: DiffusionPipeline, folder: Path) -> int:
    """Save as fp16 safetensors with the variant in their names; returns the size in bytes.

    Raises ValueError, and leaves the folder as it was, if the pipeline is larger than the limit.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    built = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        pipe.to(torch.float16).save_pretrained(built, variant="fp16")
        for encoder in built.glob("text_encoder*"):
            name_as_on_the_hub(encoder)
        size = sum(path.stat().st_size for path in built.rglob("*") if path.is_file())
        if size > LIMIT_BYTES:
            raise ValueError(f"the pipeline takes {size} bytes, the limit is {LIMIT_BYTES}: make the networks narrower")
        _move_in(built, folder)
    finally:
        shutil.rmtree(built)
    return size


def name_as_on_the_hub(encoder: Path) -> None:
    """Name the weights of a CLIPTextModel "text_model.*", as in published models, which every transformers reads.

    Since 5.6 it saves them without the prefix, and before it fills what has no prefix with random numbers.
    """
    if json.loads((encoder / "config.json").read_text())["architectures"] != ["CLIPTextModel"]:
        return
    for file in encoder.glob("*.safetensors"):
        weights = {f"{PREFIX}{name.removeprefix(PREFIX)}": weight for name, weight in load_file(file).items()}
        save_file(weights, file, metadata={"format": "pt"})


def _move_in(built: Path, folder: Path) -> None:
    for path in sorted(built.rglob("*")):
        if path.is_file():
            position = folder / path.relative_to(built)
            position.parent.mkdir(parents=True, exist_ok=True)
            path.chmod(0o644)
            path.replace(position)


def command_line(about: str | None, output: Path, **files: str) -> argparse.ArgumentParser:
    """Where the pipeline goes, and the state files it is made of: what each is of."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, what in files.items():
        parser.add_argument(f"--{name}", type=Path, required=True, help=f"state file of {what}")
    parser.add_argument("--output", type=Path, default=output)
    return parser


def package(pipe: DiffusionPipeline, folder: Path, state: Path) -> None:
    """Save the pipeline of the training run that left `state`, and say so."""
    size, progress = write(pipe, folder), read(state)["progress"]
    print(f"{folder}: {size / 1e6:.2f} MB after {progress['step']} steps, {progress['samples']} samples")


def main() -> None:
    """Package as the command line says."""
    parser = command_line(__doc__, FOLDER, unet="train_unet")
    parser.add_argument("--vae", type=Path, help="state file of train_vae; without it the packaged autoencoder stays")
    given = parser.parse_args()
    vae = trained_vae(given.vae) if given.vae else packaged_vae(given.output)
    package(assemble(averaged_networks(given.unet), vae), given.output, given.unet)


if __name__ == "__main__":
    main()
