"""Frame-by-frame decoding of LTX-Video latents. The images are those of the whole video decoded at once.

The convolutions look one frame ahead, so that each needs the next frame before it can compute one. Each layer buffers
the frames that it still needs and returns those that no later frame changes. Nothing is computed twice, and images are
some latent frames late.

    latents    0 1 2 3 4 5 6 ...
    images   . . . . 0 1 2 ...      and the rest when the video ends
"""

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from diffusers import AutoencoderKLLTXVideo
from torch import Tensor

from patchpar.errors import UnsupportedModel

TIME = 2
"""The dimension of frames in [B, C, F, H, W]."""
Frames = Iterator[Tensor | None]
"""A video piece by piece [B, C, F, H, W]; None: no frame. A layer gives one piece for each, and at last the rest."""


def each_frame(function: Callable[[Tensor], Tensor], frames: Frames) -> Frames:
    """Yield a function of each frame alone."""
    return (None if x_BCFHW is None else function(x_BCFHW) for x_BCFHW in frames)


def convolved(convolution: Any, frames: Frames) -> Frames:
    """Yield what an `LTXVideoCausalConv3d` makes, which pads both ends of a video with the outermost frame."""
    size, after = convolution.kernel_size[0], _frames_after(convolution)
    seen: Tensor | None = None
    for x_BCFHW in frames:
        if seen is None and x_BCFHW is not None:
            seen = x_BCFHW[:, :, :1].repeat(1, 1, size - 1 - after, 1, 1)
        if seen is None or x_BCFHW is None:
            yield None
            continue
        seen = torch.cat([seen, x_BCFHW], TIME)
        yield convolution.conv(seen) if seen.shape[TIME] >= size else None
        seen = seen[:, :, max(0, seen.shape[TIME] - size + 1) :]
    if seen is not None and after:
        seen = torch.cat([seen, seen[:, :, -1:].repeat(1, 1, after, 1, 1)], TIME)
        yield convolution.conv(seen) if seen.shape[TIME] >= size else None


def with_residual(
    layers: Callable[[Frames], Frames], join: Callable[[Tensor, Tensor], Tensor], frames: Frames
) -> Frames:
    """Yield `join(input, output)` of layers, both [B, C, F, H, W]. The input is buffered until the output is ready."""
    waiting: Tensor | None = None

    def entering() -> Frames:
        nonlocal waiting
        for x_BCFHW in frames:
            if x_BCFHW is not None:
                waiting = x_BCFHW if waiting is None else torch.cat([waiting, x_BCFHW], TIME)
            yield x_BCFHW

    for found in layers(entering()):
        if found is None or waiting is None:
            yield None
        else:
            now, waiting = waiting.tensor_split([found.shape[TIME]], TIME)
            yield join(now, found)


def without_first(drop: int, frames: Frames) -> Frames:
    """Yield all but the first `drop` frames."""
    for x_BCFHW in frames:
        left = x_BCFHW
        if x_BCFHW is not None and drop:
            left, drop = x_BCFHW[:, :, drop:] if x_BCFHW.shape[TIME] > drop else None, 0
        yield left


@dataclass(frozen=True, slots=True, kw_only=True)
class LtxState:
    """The decoding of one video: latents that have not been decoded, of which None is the end, and its images."""

    latents: deque[Tensor | None]
    images: Frames


class LtxDecoder:
    """Decode with `AutoencoderKLLTXVideo`. The first latent frame gives one image, each further one several.

    Raises UnsupportedModel for an autoencoder that adds noise while it decodes.
    """

    def __init__(self, vae: AutoencoderKLLTXVideo) -> None:
        if any(vae.config.decoder_inject_noise):
            raise UnsupportedModel(
                "this decoder adds noise (decoder_inject_noise), which would differ for every piece of a video: use a "
                "checkpoint without it, such as LTX-Video 0.9.5 and later"
            )
        self._vae = vae

    @property
    def per_latent(self) -> int:
        """Images per latent frame after the first."""
        return int(self._vae.temporal_compression_ratio)

    def new_state(self) -> LtxState:
        latents = deque[Tensor | None]()
        return LtxState(latents=latents, images=_decoded(self._vae, _until_none(latents)))

    def decode(self, state: LtxState, latents_BCFHW: Tensor) -> Tensor:
        """Decode latents [1, C, F, H, W] to the images that no later frame changes, [frames, 3, height, width]."""
        vae = self._vae
        mean, std = (x.view(1, -1, 1, 1, 1).to(latents_BCFHW) for x in (vae.latents_mean, vae.latents_std))
        latents = latents_BCFHW * std / vae.config.scaling_factor + mean  # as LTXPipeline does it
        state.latents.append(latents.to(vae.dtype))
        return self._images([next(state.images)])

    def finish(self, state: LtxState) -> Tensor:
        """Return the images left at the end of a video, [frames, 3, height, width]."""
        state.latents.append(None)
        return self._images(list(state.images))

    def _images(self, found: Sequence[Tensor | None]) -> Tensor:
        parts = [x_BCFHW[0].transpose(0, 1) for x_BCFHW in found if x_BCFHW is not None]
        return torch.cat(parts) if parts else torch.empty(0, 3, 1, 1, device=self._vae.device)


def _until_none(latents: deque[Tensor | None]) -> Frames:
    while (x_BCFHW := latents.popleft()) is not None:
        yield x_BCFHW


def latents_late(vae: AutoencoderKLLTXVideo) -> int:
    """Return by how many latent frames, at most, the images of a latent frame are late. Needs no weights."""
    decoder, late, rate = vae.decoder, 0.0, 1
    late += _after_all([decoder.conv_in, decoder.mid_block])
    for block in decoder.up_blocks:
        late += _after_all([block.conv_in]) / rate
        for upsampler in block.upsamplers or ():
            late += _after_all([upsampler]) / rate
            rate *= upsampler.stride[0]
        late += _after_all([block.resnets]) / rate
    return math.ceil(late + _after_all([decoder.conv_out]) / rate)


def _after_all(parts: Sequence[Any]) -> int:
    """Frames that the convolutions in these modules look ahead, summed; those of size 1 do not look ahead."""
    modules = [module for part in parts if part is not None for module in part.modules()]
    return sum(_frames_after(module) for module in modules if hasattr(module, "is_causal"))


def _frames_after(convolution: Any) -> int:
    return 0 if convolution.is_causal else (convolution.kernel_size[0] - 1) // 2


def _decoded(vae: AutoencoderKLLTXVideo, frames: Frames) -> Frames:
    """The layers of diffusers' LTXVideoDecoder3d, in its order."""
    decoder = vae.decoder
    conditioned = decoder.timestep_scale_multiplier is not None
    when = torch.zeros(1, device=vae.device, dtype=vae.dtype) if conditioned else None  # LTXPipeline's decode_timestep
    frames = convolved(decoder.conv_in, frames)
    frames = _through_resnets(decoder.mid_block, decoder.mid_block.resnets, when, frames)
    for block in decoder.up_blocks:
        if block.conv_in is not None:
            frames = _through_resnets(block, [block.conv_in], when, frames)
        for upsampler in block.upsamplers or ():
            frames = _upsampled(upsampler, frames)
        frames = _through_resnets(block, block.resnets, when, frames)
    shift, scale = _modulation(decoder, decoder.scale_shift_table, when, 2)

    def activated(x_BCFHW: Tensor) -> Tensor:
        return decoder.conv_act(_normed(decoder.norm_out, x_BCFHW) * (1 + scale) + shift)

    def unpatched(x_BCFHW: Tensor) -> Tensor:
        size = decoder.patch_size
        batch, _, *shape = x_BCFHW.shape
        x = x_BCFHW.reshape(batch, -1, decoder.patch_size_t, size, size, *shape)  # columns of a patch before its rows
        return x.permute(0, 1, 5, 2, 6, 4, 7, 3).flatten(6, 7).flatten(4, 5).flatten(2, 3)

    return each_frame(unpatched, convolved(decoder.conv_out, each_frame(activated, frames)))


def _through_resnets(block: Any, resnets: Iterable[Any], when: Tensor | None, frames: Frames) -> Frames:
    for resnet in resnets:
        frames = _through_resnet(block, resnet, when, frames)
    return frames


def _through_resnet(block: Any, resnet: Any, when: Tensor | None, frames: Frames) -> Frames:
    shift_1, scale_1, shift_2, scale_2 = _modulation(block, resnet.scale_shift_table, when, 4)

    def modulated(norm: Any, shift: Any, scale: Any, frames: Frames) -> Frames:
        return each_frame(lambda x: resnet.nonlinearity(_normed(norm, x) * (1 + scale) + shift), frames)

    def layers(frames: Frames) -> Frames:
        hidden = convolved(resnet.conv1, modulated(resnet.norm1, shift_1, scale_1, frames))
        return convolved(resnet.conv2, modulated(resnet.norm2, shift_2, scale_2, hidden))

    def join(latent: Tensor, out: Tensor) -> Tensor:
        if resnet.norm3 is not None:
            latent = _normed(resnet.norm3, latent)
        if resnet.conv_shortcut is not None:
            latent = resnet.conv_shortcut(latent)  # of size 1: a function of each frame alone
        return out + latent

    return with_residual(layers, join, frames)


def _normed(norm: Any, x_BCFHW: Tensor) -> Tensor:
    """The norm over channels, which takes them last."""
    return norm(x_BCFHW.movedim(1, -1)).movedim(-1, 1)


def _upsampled(upsampler: Any, frames: Frames) -> Frames:
    times, rows, columns = upsampler.stride
    repeats = times * rows * columns // upsampler.upscale_factor

    def unfolded(x_BCFHW: Tensor) -> Tensor:
        batch, _, *shape = x_BCFHW.shape
        x = x_BCFHW.reshape(batch, -1, times, rows, columns, *shape)
        return x.permute(0, 1, 5, 2, 6, 3, 7, 4).flatten(6, 7).flatten(4, 5).flatten(2, 3)

    def join(latent: Tensor, folded: Tensor) -> Tensor:
        out = unfolded(folded)
        return out + unfolded(latent).repeat(1, repeats, 1, 1, 1) if upsampler.residual else out

    return without_first(times - 1, with_residual(partial(convolved, upsampler.conv), join, frames))


def _modulation(block: Any, table: Tensor | None, when: Tensor | None, parts: int) -> tuple[Any, ...]:
    """The `parts` shifts and scales of the table, each [1, C, 1, 1, 1]; 0 for a decoder without a timestep."""
    if table is None or when is None:
        return (0.0,) * parts
    embedded = block.time_embedder(
        timestep=when, resolution=None, aspect_ratio=None, batch_size=1, hidden_dtype=when.dtype
    )
    return (embedded.view(1, parts, -1, 1, 1, 1) + table[None, ..., None, None, None]).unbind(1)
