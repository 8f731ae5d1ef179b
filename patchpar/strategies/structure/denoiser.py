"""A denoiser for large images that evaluates native-size patches, distributed over ranks.

    pipeline, at H x W    --->  denoise(x)  --->  the prediction for H x W, where this rank needs it
                                  |    time above the switch:  interlaced patches, guided by the anchor
                                  |    below it:               overlapping windows, blended

The pipeline, its scheduler, its guidance and its callbacks run unchanged, once, on the large latent. Predictions are
merged, never samples, so that multistep solvers work and no scheduler state has to be moved.
"""

import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn

from patchpar.comm.collectives import AxisComm
from patchpar.errors import PlanError, UnsupportedModel
from patchpar.launch.accelerators import free_bytes
from patchpar.models.info import describe
from patchpar.plan.exchange_policy import ExchangePolicy
from patchpar.plan.mesh import Axis
from patchpar.plan.step_clock import StepClock
from patchpar.shard.batch import count_branches
from patchpar.shard.stale.extrapolation import timestep_of
from patchpar.shard.step_caches import cache_of
from patchpar.shard.transformer.probe.capture import parameter_names
from patchpar.shard.unet.denoiser import PatchedDenoiser
from patchpar.shard.unet.discover import splits_into_bands
from patchpar.shard.verification_cache import VerificationCache
from patchpar.strategies.structure.after_guidance import AfterGuidance
from patchpar.strategies.structure.attention_map import AttentionMap
from patchpar.strategies.structure.content_tokens import ContentTokens
from patchpar.strategies.structure.evaluate import DenoiserCall
from patchpar.strategies.structure.initial_noise import FreshNoise, SharedNoise
from patchpar.strategies.structure.interlace import Interlace
from patchpar.strategies.structure.interlaced_stage import InterlacedStage
from patchpar.strategies.structure.native_size import NativeSize
from patchpar.strategies.structure.noise_level import level_of, refuse_thresholding
from patchpar.strategies.structure.patch_check import PatchCheck
from patchpar.strategies.structure.patch_inputs import PatchInputs
from patchpar.strategies.structure.prediction_merge import PredictionMerge
from patchpar.strategies.structure.sizing import check_room, check_teams
from patchpar.strategies.structure.structure import Method
from patchpar.strategies.structure.window_stage import WindowStage
from patchpar.strategies.structure.windows import Windows, Zone

SKIPPED_LAYERS = "skip_guidance_layers"
log = logging.getLogger(__name__)


class HighResDenoiser:
    """A denoiser that evaluates a large image as patches. Every rank passes and gets tensors of the large image's size.

    `pipe` is the pipeline that the denoiser belongs to: its scheduler gives the noise level of a timestep. Call
    `expect` and `reset` before every image, `finish` after it. `exchange` is "on", or "off" as a negative control:
    predictions of other ranks are then 0. `verifications`: of teams, which are verified at their first use, and of
    foreign code.
    """

    history = None  # no stale state, so that no step is marked as exact

    def __init__(
        self,
        denoiser: nn.Module,
        mesh: AxisComm,
        method: Method,
        *,
        pipe: Any,
        clock: StepClock | None = None,
        verifications: VerificationCache | None = None,
    ) -> None:
        self.denoiser, self.method, self.pipe = denoiser, method, pipe
        (self._comm, self.axis), self.clock = mesh, clock or StepClock()
        self.exchange, self._watched, self._is_whole = "on", False, False
        self.native = NativeSize.of(pipe, denoiser, method.native)
        self.team = team_of(denoiser, mesh, method.bands, self.native, verifications)
        self._shared = SharedNoise(pipe, method.shared_noise, self._interlace) if method.shared_noise else None
        attention = AttentionMap(denoiser)
        if method.guidance.masked and not attention.layers and self.axis.rank == 0:
            log.warning("%s has no known attention to text: its mask is 1 everywhere", type(denoiser).__name__)
        self._content = ContentTokens(pipe)
        self._structure = InterlacedStage(method, mesh, self.clock, attention, self._content)
        self._detail = WindowStage(method, mesh, self.clock, denoiser)
        self._after = AfterGuidance(mesh, self.clock, pipe)
        self._check = None
        if verifications is not None:
            of_team = None if self.team is None else self.team.foreign
            self._check = PatchCheck(denoiser, self._comm, verifications, of_team)
        self._fresh = FreshNoise(method.switch, method.seed) if method.renoised else None
        self._parameters = parameter_names(denoiser)
        self._calls_by_branch = describe(pipe).guided_by_true_scale
        self._branches: dict[Any, int] = {}

    def denoise(self, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Return what the denoiser's own `forward` would return for the whole image.

        Raises PlanError for an unsupported size, scheduler or number of ranks, UnsupportedModel for an unsupported
        call.
        """
        scheduler = self.pipe.scheduler
        refuse_thresholding(scheduler)
        layout = PatchInputs.of(
            (args, kwargs), pixels=self.native.pixels, size_conditioning=self.method.size_conditioning
        )
        denoiser_call = self._call_of(forward, layout)
        level = level_of(scheduler, timestep_of(self._parameters, args, kwargs))
        interlace = self._interlace(layout.x_BCHW)
        self._check_ranks(interlace, denoiser_call.branches)
        silent = self.exchange == "off"
        if level.time > self.method.switch:
            partial_prediction, like = self._structure.predict(denoiser_call, level, interlace)
        else:
            windows_and_zones = (
                self._windows(interlace.size, f"{self.method.seed} {self.clock.evaluation}"),
                self._zones(interlace),
            )
            parted = self._after.parted
            partial_prediction, like = self._detail.predict(
                denoiser_call, level, windows_and_zones, interlace, silent=silent, parted=parted
            )
        if self._after.takes(partial_prediction):
            return layout.output(like, self._after.put_off(layout, partial_prediction))
        merge = PredictionMerge((self._comm, self.axis), f"step {self.clock.evaluation}", silent)
        whole_BCHW = partial_prediction.finish(merge.at_once(partial_prediction))
        if not silent:
            self._after.answered(layout, whole_BCHW, denoiser_call.branches)
        return layout.output(like, whole_BCHW)

    def _call_of(self, forward: Callable[..., Any], layout: PatchInputs) -> DenoiserCall:
        in_bands = None
        if self.team is not None:
            self.team.exchange, in_bands = self.exchange, partial(self.team.denoise, forward)
        return DenoiserCall(
            forward=forward,
            layout=layout,
            branches=self._branches_of(layout.x_BCHW),
            in_bands=in_bands,
            check=self._check if self.exchange == "on" else None,
        )

    def _branches_of(self, x_BCHW: Tensor) -> int:
        """Return the number of guidance branches in a batch, counted once per image and shape. Raises PlanError."""
        if x_BCHW.shape not in self._branches:
            # Latents may be NaN where this rank needs none, and NaN is not equal to itself.
            # Without guidance, or in a call of one branch, latents repeat only where prompts have the same seed.
            is_one = self.clock.guided is False or self._calls_by_branch
            branches = 1 if is_one else count_branches(x_BCHW.nan_to_num())
            self._branches[x_BCHW.shape] = branches
            self._check_room(x_BCHW, branches)
        return self._branches[x_BCHW.shape]

    def _check_room(self, x_BCHW: Tensor, branches: int) -> None:
        """Raise PlanError for latents that exceed what is free on this rank's GPU."""
        free, pixels = free_bytes(x_BCHW.device), self.native.pixels
        size = x_BCHW.shape[-2] * pixels, x_BCHW.shape[-1] * pixels
        if free is not None:
            calls = 1 if branches > 1 or not self.clock.guided else 2  # a call for each branch
            check_room(describe(self.pipe), size, len(x_BCHW) * calls, ranks=1, free=free)

    def _interlace(self, x_BCHW: Tensor) -> Interlace:
        size = (x_BCHW.shape[-2], x_BCHW.shape[-1])
        interlace = Interlace.of(size, self.native.size, self.native.unit)
        if len(interlace) == 1:
            raise PlanError(self.native.too_small(size))
        return interlace

    def _windows(self, size: tuple[int, int], key: str) -> Windows:
        native = self.native
        return self.method.tiling.lay(size, native.size, key=key, unit=native.grid, step=native.unit)

    def _zones(self, interlace: Interlace) -> tuple[Zone, ...]:
        native = self.native
        return self.method.tiling.zones(interlace.size, native.size, unit=native.grid, step=native.unit)

    def _check_ranks(self, interlace: Interlace, branches: int) -> None:
        windows = self._windows(interlace.size, "")
        most = branches * max(len(interlace), len(windows))
        if self.axis.size > most:
            raise PlanError(
                f"axis 'patch' has {self.axis.size} ranks, but this size is {len(interlace)} patches and then "
                f"{len(windows)} windows of {branches} guidance branches each: use at most {most}"
            )

    def expect(self, call: Mapping[str, Any], *, watched: bool = False, previewed: bool = False) -> None:
        """Note the arguments of the pipeline's next `call`, the same on all ranks.

        `watched`: a callback reads the latents between its steps, on all ranks. `previewed`: the caller also gets what
        the scheduler makes of predictions.
        """
        # Guidance that skips layers has calls with other branches, of which a rank has other patches.
        self._watched, self._is_whole = watched, previewed or call.get(SKIPPED_LAYERS) is not None
        self._content.has_texts = call.get("prompt_embeds") is None

    def reset(self) -> None:
        """Begin an image. Raises UnsupportedModel for a denoiser with a cache of diffusers."""
        self._refuse_cache()
        self._after.end()
        self._branches.clear()
        self._content.reset()
        self._structure.reset()
        self._detail.begin(self.pipe.scheduler, self.native.channels)
        if self._fresh is not None:
            self._fresh.begin(self.pipe.scheduler)
        if not (self._is_whole or self.method.guidance.lag):  # the lag needs each branch of the previous step
            self._after.begin(self.pipe.scheduler, watched=self._watched)

    def _refuse_cache(self) -> None:
        name = cache_of(self.denoiser)
        if name is not None:
            raise UnsupportedModel(
                f"{name} skips blocks by what the last call of {type(self.denoiser).__name__} has kept, which is of "
                "another patch with strategy=structure: use disable_cache(), or strategy=exact"
            )

    def finish(self) -> None:
        """End an image. Raises ExchangeError, and UnsupportedModel if its latents were never completed."""
        self._after.check_whole()
        self._end()

    def _end(self) -> None:
        self._after.end()
        self._detail.end()
        if self._fresh is not None:
            self._fresh.end()

    @property
    def unsure(self) -> bool:
        """Whether the denoiser may have changed since the last call."""
        return any(each.unsure for each in (self.team, self._check) if each is not None)

    @unsure.setter
    def unsure(self, value: bool) -> None:
        for each in (self.team, self._check):
            if each is not None:
                each.unsure = value

    def forget(self) -> None:
        """Forget state of earlier calls, which only teams hold."""
        if self.team is not None:
            self.team.forget()

    def restore(self) -> None:
        """Remove all hooks: the pipeline is as it was before. Waits for no rank, since some may be lost."""
        self._detail.discard()
        self._end()
        self._content.close()
        if self.team is not None:
            self.team.restore()
        if self._shared is not None:
            self._shared.close()


def team_of(
    denoiser: nn.Module, mesh: AxisComm, bands: int, native: NativeSize, verifications: VerificationCache | None
) -> PatchedDenoiser | None:
    """Return the denoiser of this rank's team; None without teams. Without `verifications` it is not verified.

    Raises PlanError for a denoiser without bands or with too few rows, or if `bands` does not divide the ranks.
    """
    comm, axis = mesh
    if bands == 1 or axis.size == 1:
        return None
    check_teams(axis.size, bands)
    if not splits_into_bands(denoiser):
        raise PlanError(
            f"bands={bands}: {type(denoiser).__name__} is no network of convolutions and group norms, and so has no "
            "bands: use bands=1"
        )
    rows = max(native.size)
    if rows // native.unit < bands:
        most = rows // native.unit
        raise PlanError(
            f"bands={bands}: {rows} latent rows make {most} bands of {native.unit}: use at most bands={most}"
        )
    first = axis.rank - axis.rank % bands
    team = Axis(axis.name, axis.rank - first, bands, axis.ranks[first : first + bands])
    return PatchedDenoiser(denoiser, (comm, team), ExchangePolicy(name="exact"), verifications=verifications)
