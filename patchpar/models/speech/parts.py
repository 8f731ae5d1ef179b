"""`SpeechParts`: what a Wan-S2V model has beside its transformer, saved as `speech.safetensors` and `speech.json`.

    samples --wav2vec2--> features --casual_audio_encoder--> audio tokens --audio_injector--> added to a block's tokens
    latents of a block --patches of the transformer--> + pose (cond_encoder) + trainable_cond_mask[0]
    reference          --patches of the transformer--> + trainable_cond_mask[1]  \\
    earlier frames     --frame_packer----------------> + trainable_cond_mask[2]  /  sinks of all blocks

Wan-S2V, arXiv:2508.18621, section 3; Live Avatar, arXiv:2512.04677, section 4.

Shapes: B batch, C latent channels, F latent frames, H x W latent pixels or patches, L tokens, D width.
"""

import json
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from patchpar.comm.transport import TensorSpec
from patchpar.errors import PlanError
from patchpar.models.speech.audio_attention import AudioInjector
from patchpar.models.speech.audio_encoder import CausalAudioEncoder
from patchpar.models.speech.config import REACH, SpeechConfig
from patchpar.models.speech.features import SpeechFeatures
from patchpar.models.speech.frame_packer import KERNELS, FramePacker
from patchpar.plan.json_files import read_object

WEIGHTS, CONFIG = "speech.safetensors", "speech.json"
ALIGNMENT = 64
"""Bytes: torch's own allocations on CPUs begin at multiples."""
VIDEO, REFERENCE, EARLIER = range(3)
"""Rows of `trainable_cond_mask`."""


class SpeechParts(nn.Module):
    """The modules of one model. `features`: wav2vec2, on the rank that begins blocks; None on others."""

    features: SpeechFeatures | None = None

    def __init__(self, config: SpeechConfig) -> None:
        super().__init__()
        self.config, dim = config, config.dim
        self.casual_audio_encoder = CausalAudioEncoder(config.layers, config.features, dim, config.tokens)
        self.audio_injector = AudioInjector(len(config.after), dim, config.heads)
        self.frame_packer = FramePacker(config.channels, dim)
        self.cond_encoder = nn.Conv3d(config.channels, dim, kernel_size=KERNELS[0], stride=KERNELS[0])
        self.trainable_cond_mask = nn.Embedding(3, dim)

    def token_spec(self, frames: int) -> TensorSpec:
        """Return shape and dtype of the audio tokens of a block of `frames` latent frames."""
        return TensorSpec((1, frames, self.config.tokens + 2, self.config.dim), self.trainable_cond_mask.weight.dtype)

    def heard(self, samples_SPS: Tensor) -> Tensor:
        """Return the audio tokens [S, F, n + 2, D] of S speakers, from samples as SpeechConfig.inputs returns them."""
        return torch.cat([self._heard(samples) for samples in torch.split(samples_SPS, 1)])

    def _heard(self, samples_1PS: Tensor) -> Tensor:
        assert self.features is not None, "blocks begin on the rank with wav2vec2"
        config, (_, images, _) = self.config, samples_1PS.shape
        features = self.features(samples_1PS.flatten(), images, config.fps)[None]
        features = features.to(self.trainable_cond_mask.weight)
        own, first = features[..., config.context :], config.context - REACH
        return self.casual_audio_encoder(own, features[..., first : config.context] if config.continues else None)

    def encode(self, tokens_BFnD: Tensor) -> Tensor:
        """Return the audio tokens of `heard` in the dtype of the transformer, [B, F, n + 2, D]."""
        return tokens_BFnD.to(self.trainable_cond_mask.weight.dtype)

    def forward(self, layer: int, hidden_BLD: Tensor, audio_BFnD: Tensor) -> Tensor:
        """Return what is to be added to the tokens after block `layer`, [B, L, D]."""
        return self.audio_injector(self.config.after.index(layer), hidden_BLD, audio_BFnD)

    def posed(self, patches_BDFHW: Tensor, pose_BCFHW: Tensor | None = None) -> Tensor:
        """Return the patches [B, D, F, H, W] of a block with its pose, latents [B, C, F, 2 H, 2 W]; None for zeros."""
        bias = self.cond_encoder.bias
        assert bias is not None, "this convolution has one"
        pose = bias[None, :, None, None, None] if pose_BCFHW is None else self.cond_encoder(pose_BCFHW)
        return patches_BDFHW + pose + self.trainable_cond_mask.weight[VIDEO][None, :, None, None, None]

    def sinks(self, reference_BDFHW: Tensor, earlier_BCFHW: Tensor) -> Tensor:
        """Return tokens [B, L, D] of the reference's patches [B, D, 1, H, W], then of earlier latents."""
        kinds = self.trainable_cond_mask.weight
        reference = reference_BDFHW.flatten(2).transpose(1, 2) + kinds[REFERENCE]
        return torch.cat([reference, self.frame_packer(earlier_BCFHW) + kinds[EARLIER]], 1)

    def save(self, folder: Path) -> None:
        """Write weights and configuration into `folder`."""
        save_file({name: x.contiguous() for name, x in self.state_dict().items()}, folder / WEIGHTS)
        (folder / CONFIG).write_text(json.dumps(asdict(self.config), indent=2) + "\n")

    @classmethod
    def hollow(cls, folder: Path) -> "SpeechParts":
        """Return the parts that `save` has described, on the meta device. Raises PlanError."""
        try:
            config = SpeechConfig.of(read_object(folder / CONFIG))
        except TypeError as error:
            raise PlanError(f"{folder / CONFIG} is incomplete or cannot be read: {error}") from error
        with torch.device("meta"):
            return cls(config).requires_grad_(False)

    @classmethod
    def load(cls, folder: Path) -> "SpeechParts":
        """Read what `save` wrote, from safetensors only. Raises PlanError if it is missing or inconsistent."""
        try:
            parts = cls.hollow(folder)
            parts.load_state_dict(load_file(folder / WEIGHTS), assign=True)
        except (OSError, RuntimeError, SafetensorError) as error:
            raise PlanError(f"{folder / CONFIG} and {WEIGHTS} are not those of one model: {error}") from error
        align_weights(parts)
        return parts.eval().requires_grad_(False)


def align_weights(module: nn.Module) -> None:
    """Copy weights that begin at an odd byte of a mapped file, where kernels may round otherwise."""
    for weight in module.parameters():
        if weight.data_ptr() % ALIGNMENT:
            weight.data = weight.data.clone()
