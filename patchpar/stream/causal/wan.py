"""`WanStream`: a Wan-type transformer that is streamed, with prompt changes, rolling sink and decoding.

A step of a block is the velocity of the block-causal transformer at the noise level of the step, then the flow
schedule. Method: Live Avatar (arXiv:2512.04677, sections 4.1 to 4.3).

Denoising step s of block b may depend on the inputs of step s for earlier blocks and on the output of step s-1 for
block b, and on nothing else. Then step s can run on its own rank, only latents pass from rank to rank, and the result
is bit-equal to one process ("timestep-forcing pipeline", section 4.2). Models that read the clean keys and values of
earlier blocks cannot be streamed so: block b+1 would wait until block b is finished.

All randomness is keyed by seed, block and step; nothing depends on clocks, on other steps, or on the number of ranks.
"""

from collections import deque
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from patchpar.comm.transport import TensorSpec
from patchpar.errors import PlanError
from patchpar.models.streaming.causal.attention_passes import KVWindow
from patchpar.models.streaming.causal.causal_wan import BlockAudio, BlockInputs, CausalWan
from patchpar.models.streaming.decoder import DecoderState, WanDecoder, WanEncoder, as_pixels, from_pixels
from patchpar.models.streaming.flow_schedule import FlowSchedule, keyed_noise
from patchpar.shard.host_memory import to_device
from patchpar.stream.events import PARAMETERS, Change, Prompt, Reference, StepConditions
from patchpar.stream.messages import StreamRun
from patchpar.stream.stage_link import Payload


@dataclass(slots=True, kw_only=True)
class StepState:
    """State of one denoising step. `now`: what changes have made of it.

    `recent`: number and payload of the last blocks, to recompute the window.
    """

    step: int
    memory: KVWindow
    now: StepConditions
    recent: deque[tuple[int, Payload]]


class WanStream:
    """A model for `run`, with the conditions `first` at its beginning. It has a state for each denoising step.

    `low_noise`: a step, and the network for it and those after it, as Wan 2.2 has one for low noise levels.

    Payload: (latents [1, C, F, H, W], audio tokens of `token_spec`, latents of the pose). No tokens without audio, and
    no pose where a stream has none.
    """

    _kind: type[StepState] = StepState

    def __init__(
        self,
        network: CausalWan,
        schedule: FlowSchedule,
        decoder: WanDecoder | None,
        run: StreamRun,
        first: StepConditions,
        low_noise: tuple[int, CausalWan] | None = None,
    ) -> None:
        self._network, self._schedule, self._decoder, self._run = network, schedule, decoder, run
        self._first, self._low_noise = first, low_noise
        self._encoder: WanEncoder | None = None
        self._encoded = 0  # the block that the encoder goes on with
        transformer = network.transformer
        self._device, self._dtype = transformer.device, transformer.dtype
        channels = transformer.config.out_channels
        self._is_conditioned = transformer.config.in_channels > channels
        shape = (1, channels, network.options.frames, run.rows, run.columns)
        self._latents = TensorSpec(shape, self._dtype)
        self._refuse()

    def _refuse(self) -> None:
        """Raise UnsupportedModel for a model that cannot be streamed so."""

    @property
    def steps(self) -> int:
        """Denoising steps of a block, or parts of them, that can run on ranks of their own."""
        return self._schedule.steps

    @property
    def inner(self) -> int:
        """Ranks per denoising step. All of them call `new_state`, `apply` and `step` in the same order."""
        return 1 if self._network.inner is None else self._network.inner.ranks

    def payload(self) -> tuple[TensorSpec, ...]:
        """See StageModel."""
        audio = self._network.audio
        if audio is None:
            return (self._latents,)
        (_, *sizes), dtype = audio.token_spec(self._network.options.frames)
        tokens = TensorSpec((self._run.speakers, *sizes), dtype)
        return self._latents, tokens, *((self._latents,) if self._run.has_pose else ())

    def new_state(self, step: int) -> StepState:
        """Return the empty state of denoising step `step`."""
        return self.restored(step, self._first)

    def conditions(self, state: StepState) -> StepConditions:
        """Return what changes have made of a state, such as prompt and sink: later blocks do not change it."""
        return state.now

    @torch.no_grad()
    def restored(self, step: int, conditions: StepConditions) -> StepState:
        """Return a state of denoising step `step` with these conditions, and without earlier blocks."""
        state = self._kind(
            step=step,
            memory=self._of(step).memory(self._run.rows, self._run.columns),
            now=conditions.each(self._own),
            recent=deque(maxlen=self._network.options.window - 1),
        )
        self._fill_sink(state)
        return state

    def _of(self, step: int) -> CausalWan:
        start, low = self._low_noise or (0, self._network)
        return low if step >= start else self._network

    @torch.no_grad()
    def begin(self, block: int, inputs: Payload) -> Payload:
        """See StageModel. `inputs`: see AudioInputs, if the transformer takes audio."""
        noise, audio = keyed_noise(self._run.seed, block, 0, self._latents.shape), self._network.audio
        heard = (to_device(x, self._device) for x in inputs)
        return self._own(noise), *(x if audio is None else audio.heard(x) for x in heard)

    @torch.no_grad()
    def noised(self, block: int, payload: Payload, frames: Tensor) -> Payload:
        """Return the payload of `begin` started from frames [F, height, width, 3] in uint8. Called in order.

        Latents of the frames at the noise level of the first step (StreamDiffusionV2).
        """
        assert self._decoder is not None, "the first stage has the autoencoder"
        if self._encoder is None or block != self._encoded:  # a block that is begun again follows its predecessor
            self._encoder = WanEncoder(self._decoder)
        self._encoded = block + 1
        latents = self._own(self._encoder.encode(from_pixels(to_device(frames, self._device)), self._latents.shape[2]))
        return self._schedule.noised(latents, payload[0]), *payload[1:]

    @torch.no_grad()
    def posed(self, payload: Payload, frames: Tensor) -> Payload:
        """Return the payload with a pose at its end, from frames [F, height, width, 3] in uint8 of a pose video.

        Each block is encoded by itself, behind its own first image, as in Wan-S2V each clip is.

        The first latent frame of a stream, which has one image, gets it `per_latent` times.
        """
        assert self._decoder is not None, "the first stage has the autoencoder"
        images, count = from_pixels(to_device(frames, self._device)), self._latents.shape[2]
        before = images[:1].expand(1 + count * self._decoder.per_latent - len(images), -1, -1, -1)
        latents = WanEncoder(self._decoder).encode(torch.cat([before, images]), count + 1)
        return *payload, self._own(latents[:, :, 1:])

    @torch.no_grad()
    def apply(self, state: StepState, change: Change) -> None:
        """Change a condition in the state of one step, from its next block on. Raises PlanError."""
        if isinstance(change, Prompt):
            self._change_text(state, change)
        elif isinstance(change, Reference):
            given = {"sink": change.latents, "video": change.video, "masks": change.masks}
            known: dict[str, Any] = {name: self._own(x) for name, x in given.items() if x is not None}
            state.now = replace(state.now, **known)
            self._fill_sink(state)
        else:
            assert change.name in PARAMETERS
            state.now = replace(state.now, audio_scale=change.value)

    def _change_text(self, state: StepState, change: Prompt) -> None:
        state.now = state.now.prompted(self._own(change.text), change)
        if change.transition in ("switch", "blend"):
            return
        dropped = state.memory.forget(keep_sinks=change.transition == "recache")
        self._fill_sink(state)
        if change.transition == "cut":
            state.recent.clear()
        for block, payload in list(state.recent)[max(0, len(state.recent) - dropped) :]:
            self._recompute(state, block, payload)

    @torch.no_grad()
    def step(self, state: StepState, block: int, payload: Payload) -> Payload:
        """Run one denoising step of one block. Changes `state` and nothing else."""
        state.now = state.now.advanced()
        velocity = self._predicted(state, block, payload, self._schedule.timestep(state.step))
        state.recent.append((block, payload))
        return self._schedule.advance(state.step, payload[0], velocity, self._noise(block, state.step)), *payload[1:]

    def _noise(self, block: int, step: int) -> Tensor | None:
        if not self._schedule.needs_noise(step):
            return None
        return keyed_noise(self._run.seed, block, step + 1, self._latents.shape, self._device)

    def _recompute(self, state: StepState, block: int, payload: Payload) -> None:
        """Store the keys and values of a block in `state.recent` again."""
        self._predicted(state, block, payload, self._schedule.timestep(state.step))

    def _predicted(
        self, state: StepState, block: int, payload: Payload, timestep: float, *, advances: bool = True
    ) -> Tensor:
        """The velocity at a timestep. `advances`: see CausalWan.velocity."""
        network, known = self._of(state.step), state.now
        audio = BlockAudio(payload[1], known.audio_scale, known.masks) if len(payload) > 1 else None
        x_BCFHW = self._with_condition(known, payload[0], block * network.options.frames)
        pose = payload[2] if len(payload) > 2 else None
        now = BlockInputs(block=block, timestep=timestep, audio=audio, advances=advances, pose=pose)
        return network.velocity(state.memory, x_BCFHW, known.text, now)

    def _fill_sink(self, state: StepState) -> None:
        known = state.now
        if known.sink is not None:
            sink = self._with_condition(known, known.sink, 0)
            self._of(state.step).remember_sink(state.memory, sink, known.text, known.video)

    def _with_condition(self, known: StepConditions, x_BCFHW: Tensor, first: int) -> Tensor:
        """Append the image condition to the channels of latent frames from number `first` on.

        As in WanImageToVideoPipeline: a mask of the given frame, and the latents of the image followed by grey images.
        """
        if not self._is_conditioned:
            return x_BCFHW
        if known.video is None:
            raise PlanError("this model generates from an image: begin the stream with reference=")
        numbers = torch.arange(first, first + x_BCFHW.shape[2], device=x_BCFHW.device)
        latents = known.video[:, :, numbers.clamp(max=known.video.shape[2] - 1)]
        masks = self._network.transformer.config.in_channels - x_BCFHW.shape[1] - latents.shape[1]
        given = (numbers == 0).to(x_BCFHW.dtype)[None, None, :, None, None]
        return torch.cat([x_BCFHW, given.expand(1, masks, -1, *x_BCFHW.shape[3:]), latents], 1)

    @property
    def adapts_sink(self) -> bool:
        """Whether the sink of later blocks is made from the first finished block."""
        return self._run.adapt_sink and not self._is_conditioned

    def adaptive_sink(self, payload: Payload) -> Change:
        """Return the change that sets this sink, from the payload of the first finished block.

        Taken from the latents, so that no error of decoding and encoding is added.
        """
        return Reference(latents=payload[0][:, :, :1])

    def new_decoder(self) -> DecoderState:
        """Return the empty state of a decoder, for a stream's first block."""
        return DecoderState()

    @torch.no_grad()
    def decode(self, decoder: DecoderState, payload: Payload) -> Tensor:
        """Decode a finished block to [frames, height, width, 3] in uint8. The first block may give fewer frames."""
        assert self._decoder is not None, "this stage was not given a decoder"
        return as_pixels(self._decoder.decode(decoder, payload[0]))

    def _own(self, x: Tensor) -> Tensor:
        return to_device(x, self._device).to(self._dtype)
