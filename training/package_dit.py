"""Write the trained DiT as a diffusers pipeline folder, with the text encoders and the autoencoder of the UNet's.

python -m training.package_dit --dit runs/dit.pt --output assets/scenes-dit
"""

from __future__ import annotations

from pathlib import Path

import torch
from diffusers import AutoencoderKL, StableDiffusion3Pipeline

from training.checkpoint import read
from training.dit import DitNetworks, flow_scheduler
from training.package import FOLDER, command_line, package
from training.tokenizer import build_tokenizer

DIT_FOLDER = FOLDER.parent / "scenes-dit"


def averaged_dit(checkpoint: Path) -> DitNetworks:
    """The moving average of a training run's weights, and its text encoders."""
    networks, state = DitNetworks(), read(checkpoint)
    networks.load_state_dict({**state["networks"], **state["average"]})
    return networks.eval()


def shared_vae(folder: Path = FOLDER) -> AutoencoderKL:
    """The autoencoder of a packaged pipeline. SD3's pipeline wants to be told that latents are not shifted."""
    return AutoencoderKL.from_pretrained(
        folder / "vae", variant="fp16", torch_dtype=torch.float32, shift_factor=0.0
    ).eval()


def assemble(networks: DitNetworks, vae: AutoencoderKL) -> StableDiffusion3Pipeline:
    """The pipeline, without a third text encoder."""
    tokenizer = build_tokenizer()
    return StableDiffusion3Pipeline(
        vae=vae,
        transformer=networks.transformer,
        scheduler=flow_scheduler(),
        text_encoder=networks.text_encoder,
        text_encoder_2=networks.text_encoder_2,
        text_encoder_3=None,
        tokenizer=tokenizer,
        tokenizer_2=tokenizer,
        tokenizer_3=None,
    )


def main() -> None:
    """Package as the command line says."""
    parser = command_line(__doc__, DIT_FOLDER, dit="train_dit")
    parser.add_argument("--beside", type=Path, default=FOLDER, help="packaged UNet pipeline, for its autoencoder")
    given = parser.parse_args()
    package(assemble(averaged_dit(given.dit), shared_vae(given.beside)), given.output, given.dit)


if __name__ == "__main__":
    main()
