"""`StreamingPipeline`: streams of a block-causal model, with its denoising steps on different ranks."""

import warnings
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from patchpar.errors import PlanError
from patchpar.launch.devices import Devices
from patchpar.launch.slurm import resolve_devices_of_task
from patchpar.models.files import path_of, shipped_name
from patchpar.models.streaming.config import StreamConfig
from patchpar.models.streaming.lora import LORA, LoraFile
from patchpar.models.streaming.stream_folder import StreamFolder
from patchpar.plan.stream_plan import StreamPlan
from patchpar.stream.audio_sources import Audio, audio_source, check_voices
from patchpar.stream.audio_track import AudioSource
from patchpar.stream.delivery import StreamDelivery, StreamFormat
from patchpar.stream.journal import JournalHeader, StreamJournal
from patchpar.stream.messages import PromptUpdate, ReferenceUpdate, StreamRun, Update
from patchpar.stream.recording import RecordedAudio, StreamRecording
from patchpar.stream.session import StreamSession
from patchpar.stream.video_source import FrameSources, Video, load_reference_image
from patchpar.stream.worker_group import ModelLoading, VideoStreamingPipeline, WorkerGroup, with_default_dtype


class StreamingPipeline(VideoStreamingPipeline[StreamConfig, StreamSession]):
    """A block-causal model for streams. Made by `from_pretrained`; a context manager."""

    @classmethod
    def from_pretrained(
        cls,
        folder: str | Path,
        *,
        devices: object = "auto",
        plan: StreamPlan | None = None,
        config: StreamConfig | None = None,
        lora: str | Path | None = None,
        deadline: float = 60.0,
        **options: Any,
    ) -> "StreamingPipeline":
        """Load a WanPipeline of a block-causal model: a folder, or a name of the hub, which is downloaded.

        `devices`: see ParallelPipeline. `plan`: steps by rank; even by default. `config`: replaces the folder's
        stream.json. `lora`: a file that is merged into the transformer, or `PATH:SCALE`. `deadline`: seconds that a
        rank may wait for another. Other options are those of diffusers' from_pretrained; the dtype is bfloat16 by
        default on accelerators. Raises PlanError, UnsupportedModel, LaunchError.
        """
        file = None if lora is None else LoraFile.of(lora)
        known = StreamFolder.read(folder, config=config, options=options)
        config = known.config
        if file is not None:
            from patchpar.models.streaming.checkpoint import check_lora_fits  # which imports diffusers

            check_lora_fits(Path(known.path), file)  # before ranks load the model
        found = resolve_devices_of_task(devices)
        plan = plan or StreamPlan.on_devices(config.pipeline_steps, len(found.names))
        _check(plan, config, found)
        loading = ModelLoading(
            folder=known.path,
            config=config,
            options=with_default_dtype(known.options, found.names) | ({} if file is None else {LORA: str(file)}),
            devices=found.names,
            deadline=deadline,
        )
        ranks, facts = loading.start(plan, found.names)
        return cls(WorkerGroup(ranks, plan, loading), config, facts)

    @property
    def rate(self) -> int | None:
        """Audio samples per second that the model takes; None if it takes no audio."""
        return None if self._facts.audio is None else int(self._facts.audio.rate)

    def stream(  # noqa: PLR0913 - each is a setting of its own, by name
        self,
        prompt: str = "",
        *,
        reference: Any = None,
        audio: Audio = None,
        masks: Sequence[Any] | None = None,
        seed: int = 0,
        seconds: float | None = None,
        video: Video | None = None,
        strength: float | None = None,
        pose: Video | None = None,
        delivery: StreamDelivery | None = None,
    ) -> StreamSession:
        """Begin a stream. Only one stream runs at a time; use it in a `with` block.

        `reference`: an image whose appearance the stream keeps: a file, PIL, or [height, width, 3] in uint8. `audio`: a
        file, or (samples [N] or [channels, N], rate), for a stream of its length; "live" for `push_audio`; None for
        silence; a list for several speakers, with as many `masks`: images like the reference, white where each is.
        `seconds`: length; None for no end, except that of audio and video. `video`: a file, images, or "live" for
        `push_frame`, whose latents the stream starts from, at noise level `strength`, 0 to 1; by default that of the
        model. `pose`: a file or images of a pose video, for Wan-S2V models. Raises PlanError.
        """
        with self._begun() as workers:
            delivery = delivery or StreamDelivery()
            self._check_video(video is not None, strength)
            if pose is not None and not self._facts.hears_speech:
                raise PlanError("pose=: this model takes no pose video, which Wan-S2V and Live Avatar do; leave it out")
            check_voices(audio, None if masks is None else len(masks), hears_several=self._facts.hears_speech)
            if delivery.record is not None and any(given is not None for given in (video, pose, masks)):
                raise PlanError("record=: a recording holds no frames of a video, nor several voices: leave it out")
            run = self._stream_run(seed, adapt_sink=self.config.adapt_sink, settles=self.plan.steps)
            run = replace(run, strength=strength, has_pose=pose is not None, speakers=len(masks or [None]))
            form = self._format_at(delivery.fps or self.config.fps)
            frames = FrameSources.of(video, pose, form)
            source = audio_source(self._facts.audio, self.config.blocks.frames, audio, keep_alive=delivery.keep_alive)
            updates = self._updates(prompt, reference, masks)
            record = delivery.record
            journal = None if record is None else StreamJournal(path_of(record), self._origin(run, form.fps))
            credit, blocks = self.plan.depth + delivery.lead, form.blocks(seconds)
            session = StreamSession(workers.run, (run,), form, delivery, source, frames, credit=credit, blocks=blocks)
            self._session = session.begin(*updates, journal=journal)
            return self._session

    def _check_video(self, has_video: bool, strength: float | None) -> None:
        level = self.config.schedule.begun_at(strength).sigmas[0]
        if has_video and level == 1:
            raise PlanError("video= at noise level 1, where nothing of it is left: pass strength=, such as 0.7")
        if not has_video and (strength is not None or level < 1):
            raise PlanError(f"this stream starts at noise level {level:g}: pass video=, which it starts from")

    def replay(self, recording: StreamRecording, *, delivery: StreamDelivery | None = None) -> StreamSession:
        """Generate a recorded stream again, bit-equal, also on another number of ranks.

        `recording`: see StreamRecording.read; its `is_as_it_was` compares a chunk with the recording. The stream is not
        resumed when a worker dies, nor recorded again. Raises PlanError.
        """
        with self._begun() as workers:
            delivery, form = delivery or StreamDelivery(), self._format_at(recording.origin.fps)
            _check_replay(delivery, recording.origin.fps)
            blocks, audio = recording.blocks, self._facts.audio
            run = self._stream_run(recording.origin.seed, adapt_sink=self.config.adapt_sink)
            audio_shape = None if audio is None else audio.shape(self.config.blocks.frames)
            recording.check_fits((run.rows, run.columns), audio_shape)
            source: AudioSource | None = None if audio is None else RecordedAudio(blocks)
            runs, once = recording.runs(run), replace(delivery, restarts=0)
            credit = self.plan.depth + delivery.lead
            session = StreamSession(workers.run, runs, form, once, source, credit=credit, blocks=len(blocks))
            self._session = session.begin(changes=recording.updates())
            return self._session

    def _format_at(self, fps: float) -> StreamFormat:
        """The format at this rate. Raises PlanError if audio and frames would drift apart."""
        config, facts = self.config, self._facts
        if facts.audio is not None and fps != facts.audio.fps:
            raise PlanError(
                f"fps={fps:g}, but this model takes audio for {facts.audio.fps:g} frames a second, so that audio and "
                f"frames would drift apart: use fps={facts.audio.fps:g}"
            )
        if fps != config.fps:
            text = f"fps={fps:g}: this model was trained for {config.fps:g}, so that motion is faster or slower"
            warnings.warn(text, stacklevel=3)
        return self._format(fps, config.blocks.frames)

    def _updates(self, prompt: str, reference: Any, masks: Sequence[Any] | None) -> list[Update]:
        updates: list[Update] = [PromptUpdate(text=prompt)]
        if reference is None and self.config.reference is not None:
            reference = Path(self._workers.loading.folder) / self.config.reference
        if reference is None and self._facts.starts_from_image:
            raise PlanError("this model starts from an image: pass reference=")
        if reference is not None:
            size = self.config.height, self.config.width
            image, *parts = (load_reference_image(each, *size) for each in (reference, *(masks or ())))
            found = torch.stack([part.float().mean(2).round().to(torch.uint8) for part in parts]) if parts else None
            updates.append(ReferenceUpdate(image=image, masks=found))
        return updates

    def _origin(self, run: StreamRun, fps: float) -> JournalHeader:
        loading = self._workers.loading
        return JournalHeader(
            model=shipped_name(loading.folder) or str(Path(loading.folder).absolute()),
            config=self.config,
            options=loading.options,
            seed=run.seed,
            fps=fps,
            size=(run.rows, run.columns),
            versions={name: version(name) for name in ("patchpar", "torch", "diffusers")},
        )

    def __repr__(self) -> str:
        return f"<StreamingPipeline, {self.plan}>"


def _check(plan: StreamPlan, config: StreamConfig, devices: Devices) -> None:
    history = config.blocks.history
    if plan.steps != config.pipeline_steps:
        known = f"the model has {config.steps}"
        if not config.blocks.is_pipelined:
            known = f"a block of this model is one step, since each attends to the finished one before it ({history=})"
        raise PlanError(f"the plan has {plan.steps} steps, but {known}")
    if plan.ranks > len(devices.names):
        raise PlanError(
            f"the plan needs {plan.ranks} ranks, but there are {len(devices.names)} devices ({devices.note})"
        )


def _check_replay(delivery: StreamDelivery, fps: float) -> None:
    """Raise PlanError for what a recording determines."""
    if delivery.record is not None:
        raise PlanError(f"record={str(delivery.record)!r}: a replay is what its recording says: copy that")
    if delivery.keep_alive:
        raise PlanError("keep_alive=True: the audio of a replay is recorded: leave it out")
    if delivery.fps not in (None, fps):
        raise PlanError(f"fps={delivery.fps:g}: this stream was recorded with {fps:g} frames a second: leave it out")
