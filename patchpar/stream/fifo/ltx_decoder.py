"""Frame-by-frame decoding of LTX-Video latents. The images are those of the whole video decoded at once.

The convolutions look one frame ahead, so that each needs the next frame before it can compute one. Each layer buffers
the frames that it still needs and returns those that no later frame changes. Nothing is computed twice, and images are
some latent frames late.

    latents    0 1 2 3 4 5 6 ...
    images   . . . . 0 1 2 ...      and the rest when the video ends
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from diffusers import AutoencoderKLLTXVideo
from torch import Tensor

from patchpar.errors import UnsupportedModel

TIME = 2
"""The dimension of frames in [B, C, F, H, W]."""


class StreamingLayer(Protocol):
    """One or several layers that take frames piece by piece. None stands for no frame, as input and output."""

    def push(self, x_BCFHW: Tensor | None, *, is_last: bool) -> Tensor | None:
        """Return the output frames that no later frame changes. `is_last`: no `push` follows."""


class PerFrameLayer(StreamingLayer):
    """A function of each frame alone, of [B, C, F, H, W]."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        self._function = function

    def push(self, x_BCFHW: Tensor | None, *, is_last: bool) -> Tensor | None:
        return None if x_BCFHW is None else self._function(x_BCFHW)


class StreamingConvolution(StreamingLayer):
    """An `LTXVideoCausalConv3d`, which pads both ends of a video with the outermost frame."""

    def __init__(self, convolution: Any) -> None:
        self._inner, self._size = convolution.conv, convolution.kernel_size[0]
        self._after = _frames_after(convolution)
        self._kept: Tensor | None = None

    def push(self, x_BCFHW: Tensor | None, *, is_last: bool) -> Tensor | None:
        if self._kept is None and x_BCFHW is not None:
            self._kept = x_BCFHW[:, :, :1].repeat(1, 1, self._size - 1 - self._after, 1, 1)
        seen = _joined(self._kept, x_BCFHW)
        if seen is None:
            return None
        if is_last:
            seen = torch.cat([seen, seen[:, :, -1:].repeat(1, 1, self._after, 1, 1)], TIME)
        self._kept = seen[:, :, max(0, seen.shape[TIME] - self._size + 1) :]
        return self._inner(seen) if seen.shape[TIME] >= self._size else None


class StreamingResidual(StreamingLayer):
    """A residual connection around `layers`: `join(input, output)`, both [B, C, F, H, W].

    The input is buffered until the output is ready.
    """

    def __init__(self, layers: StreamingLayer, join: Callable[[Tensor, Tensor], Tensor]) -> None:
        self._layers, self._join = layers, join
        self._waiting: Tensor | None = None

    def push(self, x_BCFHW: Tensor | None, *, is_last: bool) -> Tensor | None:
        self._waiting = _joined(self._waiting, x_BCFHW)
        found = self._layers.push(x_BCFHW, is_last=is_last)
        if found is None or self._waiting is None:
            return None
        now, self._waiting = self._waiting.tensor_split([found.shape[TIME]], TIME)
        return self._join(now, found)


class StreamingTrim(StreamingLayer):
    """Layers whose first `drop` output frames are removed."""

    def __init__(self, layers: StreamingLayer, drop: int) -> None:
        self._layers, self._drop = layers, drop

    def push(self, x_BCFHW: Tensor | None, *, is_last: bool) -> Tensor | None:
        found = self._layers.push(x_BCFHW, is_last=is_last)
        if found is None:
            return None
        drop, self._drop = self._drop, 0
        return found[:, :, drop:] if found.shape[TIME] > drop else None


class StreamingChain(StreamingLayer):
    """Layers one after another."""

    def __init__(self, layers: Sequence[StreamingLayer]) -> None:
        self._layers = tuple(layers)

    def push(self, x_BCFHW: Tensor | None, *, is_last: bool) -> Tensor | None:
        for layer in self._layers:
            x_BCFHW = layer.push(x_BCFHW, is_last=is_last)
        return x_BCFHW


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

    def new_state(self) -> StreamingLayer:
        return _decoder(self._vae)

    def decode(self, state: StreamingLayer, latents_BCFHW: Tensor) -> Tensor:
        """Decode latents [1, C, F, H, W] to the images that no later frame changes, [frames, 3, height, width]."""
        vae = self._vae
        mean, std = (x.view(1, -1, 1, 1, 1).to(latents_BCFHW) for x in (vae.latents_mean, vae.latents_std))
        latents = latents_BCFHW * std / vae.config.scaling_factor + mean  # as LTXPipeline does it
        return self._images(state.push(latents.to(vae.dtype), is_last=False))

    def finish(self, state: StreamingLayer) -> Tensor:
        """Return the images left at the end of a video, [frames, 3, height, width]."""
        return self._images(state.push(None, is_last=True))

    def _images(self, found_BCFHW: Tensor | None) -> Tensor:
        if found_BCFHW is None:
            return torch.empty(0, 3, 1, 1, device=self._vae.device)
        return found_BCFHW[0].transpose(0, 1)


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


def _decoder(vae: AutoencoderKLLTXVideo) -> StreamingLayer:
    """The layers of diffusers' LTXVideoDecoder3d, in its order."""
    decoder = vae.decoder
    conditioned = decoder.timestep_scale_multiplier is not None
    when = torch.zeros(1, device=vae.device, dtype=vae.dtype) if conditioned else None  # LTXPipeline's decode_timestep
    layers: list[StreamingLayer] = [
        StreamingConvolution(decoder.conv_in),
        *_resnets(decoder.mid_block, decoder.mid_block.resnets, when),
    ]
    for block in decoder.up_blocks:
        layers += [] if block.conv_in is None else _resnets(block, [block.conv_in], when)
        layers += [_upsampler(upsampler) for upsampler in block.upsamplers or ()]
        layers += _resnets(block, block.resnets, when)
    shift, scale = _modulation(decoder, decoder.scale_shift_table, when, 2)

    def activated(x_BCFHW: Tensor) -> Tensor:
        return decoder.conv_act(_normed(decoder.norm_out, x_BCFHW) * (1 + scale) + shift)

    def unpatched(x_BCFHW: Tensor) -> Tensor:
        size = decoder.patch_size
        batch, _, *shape = x_BCFHW.shape
        x = x_BCFHW.reshape(batch, -1, decoder.patch_size_t, size, size, *shape)  # columns of a patch before its rows
        return x.permute(0, 1, 5, 2, 6, 4, 7, 3).flatten(6, 7).flatten(4, 5).flatten(2, 3)

    return StreamingChain(
        [*layers, PerFrameLayer(activated), StreamingConvolution(decoder.conv_out), PerFrameLayer(unpatched)]
    )


def _resnets(block: Any, resnets: Sequence[Any], when: Tensor | None) -> list[StreamingLayer]:
    return [_resnet(block, resnet, when) for resnet in resnets]


def _resnet(block: Any, resnet: Any, when: Tensor | None) -> StreamingLayer:
    shift_1, scale_1, shift_2, scale_2 = _modulation(block, resnet.scale_shift_table, when, 4)

    def modulated(norm: Any, shift: Any, scale: Any) -> StreamingLayer:
        return PerFrameLayer(lambda x: resnet.nonlinearity(_normed(norm, x) * (1 + scale) + shift))

    def join(latent: Tensor, out: Tensor) -> Tensor:
        if resnet.norm3 is not None:
            latent = _normed(resnet.norm3, latent)
        if resnet.conv_shortcut is not None:
            latent = resnet.conv_shortcut(latent)  # of size 1: a function of each frame alone
        return out + latent

    inside = StreamingChain(
        [
            modulated(resnet.norm1, shift_1, scale_1),
            StreamingConvolution(resnet.conv1),
            modulated(resnet.norm2, shift_2, scale_2),
            StreamingConvolution(resnet.conv2),
        ]
    )
    return StreamingResidual(inside, join)


def _normed(norm: Any, x_BCFHW: Tensor) -> Tensor:
    """The norm over channels, which takes them last."""
    return norm(x_BCFHW.movedim(1, -1)).movedim(-1, 1)


def _upsampler(upsampler: Any) -> StreamingLayer:
    frames, rows, columns = upsampler.stride
    repeats = frames * rows * columns // upsampler.upscale_factor

    def unfolded(x_BCFHW: Tensor) -> Tensor:
        batch, _, *shape = x_BCFHW.shape
        x = x_BCFHW.reshape(batch, -1, frames, rows, columns, *shape)
        return x.permute(0, 1, 5, 2, 6, 3, 7, 4).flatten(6, 7).flatten(4, 5).flatten(2, 3)

    def join(latent: Tensor, folded: Tensor) -> Tensor:
        out = unfolded(folded)
        return out + unfolded(latent).repeat(1, repeats, 1, 1, 1) if upsampler.residual else out

    return StreamingTrim(StreamingResidual(StreamingConvolution(upsampler.conv), join), frames - 1)


def _modulation(block: Any, table: Tensor | None, when: Tensor | None, parts: int) -> tuple[Any, ...]:
    """The `parts` shifts and scales of the table, each [1, C, 1, 1, 1]; 0 for a decoder without a timestep."""
    if table is None or when is None:
        return (0.0,) * parts
    embedded = block.time_embedder(
        timestep=when, resolution=None, aspect_ratio=None, batch_size=1, hidden_dtype=when.dtype
    )
    return (embedded.view(1, parts, -1, 1, 1, 1) + table[None, ..., None, None, None]).unbind(1)


def _joined(before: Tensor | None, after: Tensor | None) -> Tensor | None:
    if before is None or after is None:
        return after if before is None else before
    return torch.cat([before, after], TIME)
