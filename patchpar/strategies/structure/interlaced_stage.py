"""The first stage: interlaced patches, each the whole image at native size, guided by the first, the anchor."""

from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from patchpar.comm.collectives import AxisComm
from patchpar.comm.transport import TensorSpec
from patchpar.plan.step_clock import StepClock
from patchpar.strategies.structure.all_gather import UnitAssignment
from patchpar.strategies.structure.attention_map import AttentionMap, AttentionRecorder
from patchpar.strategies.structure.blending import BlendPlan
from patchpar.strategies.structure.content_tokens import ContentTokens
from patchpar.strategies.structure.evaluate import DenoiserCall
from patchpar.strategies.structure.interlace import Interlace
from patchpar.strategies.structure.noise_level import NoiseLevel, refuse_without_signal
from patchpar.strategies.structure.partial_prediction import PartialPrediction, WholePrediction
from patchpar.strategies.structure.patch_inputs import PatchPosition
from patchpar.strategies.structure.structure import LaggedTarget, Method, StructureTarget, guided, target_of
from patchpar.strategies.structure.windows import Windows
from patchpar.strategies.structure.work_schedule import Evaluation, Unit, own_of, scheduled


class InterlacedStage:
    """Steps of the first stage on one rank of an axis. Call `reset` before every image."""

    def __init__(
        self, method: Method, mesh: AxisComm, clock: StepClock, attention: AttentionMap, content: ContentTokens
    ) -> None:
        self._method, self._mesh, self._clock = method, mesh, clock
        self._attention, self._content = attention, content
        self._mask: Tensor | None = None  # of this step's first call
        self._target = LaggedTarget[StructureTarget](clock, method.guidance.lag, lambda each: each.field_BChw.shape)

    def reset(self) -> None:
        """Begin an image."""
        self._mask = None
        self._target.reset()

    def predict(
        self, denoiser_call: DenoiserCall, level: NoiseLevel, interlace: Interlace
    ) -> tuple[PartialPrediction, Any]:
        """Return this rank's partial prediction and one output of the denoiser. Raises PlanError."""
        refuse_without_signal(level, self._method.guidance.space)
        axis, size = self._mesh[1], interlace.patch_size
        x_NBChw = interlace.split(denoiser_call.layout.x_BCHW)
        evaluated = 1 if self._needs_anchor_only(level) else len(interlace)
        schedule = scheduled(
            evaluated, denoiser_call.branches, axis.size, 1 if self._records_attention else self._method.bands
        )
        assignment, watcher = schedule.assignment, self._watcher(denoiser_call, size)
        own, like = denoiser_call.evaluated(
            schedule, axis.rank, lambda patch: (x_NBChw[patch], PatchPosition(size)), watcher.around
        )
        one = next(iter(own.values()))
        stacked = tuple((number * size[0], 0) for number in range(evaluated))
        windows = Windows((evaluated * size[0], size[1]), size, stacked)
        blend = BlendPlan.of(windows, assignment, denoiser_call.branches)
        partial_prediction = PartialPrediction(
            canvas_KBCHW=blend.sums(own_of(assignment[axis.rank], own), one),
            covered_HW=blend.covered(axis.rank, one),
            dtype=one.dtype,
            windows=windows,
            assignment=assignment,
            finish=partial(self._finished, level, interlace, x_NBChw),
            interlace=interlace,
            mask=self._mask_of(watcher, assignment, one),
        )
        return partial_prediction, like

    def _mask_of(
        self, watcher: "_AnchorRecorder", assignment: UnitAssignment, one: Tensor
    ) -> tuple[int, TensorSpec, Tensor | None] | None:
        """Return the group rank that has the mask of this call, its spec, and the mask on that rank."""
        if not watcher.wanted:
            return None
        owner, size = _owner(assignment, watcher.unit), (one.shape[-2], one.shape[-1])
        own = watcher.mask(one, size) if owner == self._mesh[1].rank else None
        return owner, TensorSpec((one.shape[0], 1, *size), torch.float32), own

    def _finished(self, level: NoiseLevel, interlace: Interlace, x_NBChw: Tensor, whole: WholePrediction) -> Tensor:
        """Return the prediction of the whole image, guided by the anchor: x_BCHW."""
        if whole.mask_B1hw is not None:
            self._mask = whole.mask_B1hw
        patches = torch.stack(torch.split(whole.prediction_BCHW, interlace.patch_size[0], -2))
        patches = patches.expand(len(interlace), *patches.shape[1:])
        return interlace.join(self._guided(level, interlace, x_NBChw[:, : patches.shape[1]], patches))

    def _needs_anchor_only(self, level: NoiseLevel) -> bool:
        """Whether nothing of the other patches' predictions is used, so that only the anchor is evaluated."""
        guidance = self._method.guidance
        whole = guidance.strength(self._method.progress(level.time)) == 1
        return whole and guidance.space == "x0" and not self._records_attention

    @property
    def _records_attention(self) -> bool:
        """Whether the anchor's attention is recorded; its rank then evaluates it whole, not in bands."""
        return self._method.guidance.masked and bool(self._attention.layers)

    def _guided(self, level: NoiseLevel, interlace: Interlace, x_NBChw: Tensor, patches_NBChw: Tensor) -> Tensor:
        guidance = self._method.guidance
        channels = min(x_NBChw.shape[2], patches_NBChw.shape[2])  # more are an inpainting input or a variance
        x, prediction = x_NBChw[:, :, :channels].float(), patches_NBChw[:, :, :channels].float()
        mask = None
        if self._mask is not None and guidance.masked:
            mask = self._mask.repeat(x.shape[1] // len(self._mask), 1, 1, 1)
        target = self._target.of(target_of(guidance, level, x[0], prediction[0], mask))
        strength = guidance.strength(self._method.progress(level.time))
        moved = guided(guidance, level, interlace, target, (x, prediction), strength).to(patches_NBChw.dtype)
        return torch.cat([moved, patches_NBChw[:, :, channels:]], 2)

    def _watcher(self, denoiser_call: DenoiserCall, size: tuple[int, int]) -> "_AnchorRecorder":
        """Return a recorder, active in a step's first call, which has the prompt; a second has the negative prompt."""
        _, kwargs = denoiser_call.layout.call
        text = kwargs.get("encoder_hidden_states")
        wanted = self._records_attention and self._clock.call <= 0
        if not wanted or not isinstance(text, Tensor):
            return _AnchorRecorder(self._attention, None, Unit(0, denoiser_call.branches - 1))
        weights = self._content.weights(len(denoiser_call.layout.x_BCHW) // denoiser_call.branches, text.shape[1])
        return _AnchorRecorder(self._attention, weights.to(text.device), Unit(0, denoiser_call.branches - 1))


class _AnchorRecorder:
    """Records the attention of the anchor's last branch, the one with the prompt."""

    def __init__(self, attention: AttentionMap, weights_BT: Tensor | None, unit: Unit) -> None:
        self._attention, self._weights_BT, self.unit = attention, weights_BT, unit
        self._recording: AttentionRecorder | None = None

    @property
    def wanted(self) -> bool:
        """Whether there is anything to record."""
        return self._weights_BT is not None

    def around(self, evaluation: Evaluation) -> AbstractContextManager[object]:
        """Return the context to enter for a call of the denoiser."""
        if self._weights_BT is None or evaluation.patch != self.unit.patch:
            return nullcontext()
        if self.unit.branch not in evaluation.branches:
            return nullcontext()
        self._recording = AttentionRecorder(self._weights_BT)
        return self._attention.recorded_by(self._recording)

    def mask(self, like: Tensor, size: tuple[int, int]) -> Tensor:
        """Return the mask [B, 1, h, w], 1 everywhere if no attention was recorded."""
        found = None if self._recording is None else self._recording.mask(size)
        return torch.ones(len(like), 1, *size, device=like.device) if found is None else found


def _owner(assignment: UnitAssignment, unit: Unit) -> int:
    return next(group_rank for group_rank, units in enumerate(assignment) if unit in units)
