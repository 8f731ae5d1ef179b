"""A request for images as calls of the pipeline: checked against the limits and the model before it is queued."""

import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from patchpar.errors import PlanError
from patchpar.models.info import PipelineInfo
from patchpar.pipeline.validate import check_call, check_plan_for
from patchpar.plan.plan import Plan
from patchpar.serving.image_encoding import MOST_SIDE
from patchpar.serving.image_request import OutputFormat
from patchpar.serving.lora_registry import LoraRegistry
from patchpar.serving.pipeline_fields import PipelineFields, field_of
from patchpar.serving.rank_pool import RankPool
from patchpar.serving.request_error import RequestError
from patchpar.serving.settings import RequestLimits, ServedModel
from patchpar.serving.upload_arguments import MIN_SIDE, uploaded_size, with_uploads
from patchpar.serving.uploaded_image import Uploads, with_decoded
from patchpar.strategies.structure.options import StructureGuidance

NO_UPLOADS = Uploads()
RANDOM_SEEDS = 2**32
PASSED_ON = ("negative_prompt", "num_inference_steps", "guidance_scale", "true_cfg_scale", "strength")
"""Fields that are arguments of pipelines by the same name."""
STEPS = "num_inference_steps"
SIZE = re.compile(r"([1-9][0-9]{0,17})x([1-9][0-9]{0,17})")


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageCall:
    """One call of the pipeline for each image, with `arguments`, images as files, and a generator of its own.

    `size`: width and height in pixels. Image i has the seed `seed` + i. `plan`: that of this request; None for the
    server's own. `degree`: the devices that it asks for; None where a plan, or the server, says it. `partial_images`:
    how many come before each image, and `decodes_partial_images`: by the pipeline's decoder. `loras`: scales of those
    that act, by name.
    """

    arguments: Mapping[str, Any]
    seed: int
    count: int
    size: tuple[int, int]
    plan: Plan | str | None = None
    degree: int | None = None
    partial_images: int = 0
    decodes_partial_images: bool = False
    loras: Mapping[str, float] = field(default_factory=dict)

    def plan_of(self, served: ServedModel) -> Plan | str:
        """Return the plan of this request on a server."""
        return served.plan if self.plan is None else self.plan

    def devices_of(self, served: ServedModel) -> int:
        """Return how many devices work on it, unless a policy gives it another number."""
        return self.degree or served.devices_of(self.plan_of(served))

    def decoded(self) -> "ImageCall":
        """Return the call with PIL images as arguments, for the time in which it is made."""
        return replace(self, arguments=with_decoded(self.arguments))

    @property
    def seeds(self) -> tuple[int, ...]:
        """The seed of each image."""
        return tuple(self.seed + number for number in range(self.count))


@dataclass(frozen=True, slots=True, kw_only=True)
class CallRules:
    """What requests are checked against: the model, its devices and plan as they are served, and limits.

    `needs_image`: the model cannot do without an image. `loras`: those that requests may select. `ranks`: those that
    are served; None is one for each device. `why_no_decoder`: why the model cannot decode partial images; "" if it can.
    """

    model: PipelineInfo
    served: ServedModel
    limits: RequestLimits
    needs_image: bool = False
    loras: LoraRegistry = field(default_factory=LoraRegistry)
    ranks: RankPool | None = None
    why_no_decoder: str = ""

    @property
    def devices(self) -> int:
        """How many devices are in service."""
        return len(self.served.devices) if self.ranks is None else self.ranks.in_service

    def call_of(self, request: PipelineFields, uploads: Uploads = NO_UPLOADS, **extra: Any) -> ImageCall:
        """Return the calls of a request. Raises RequestError for a field that the model or a limit refuses.

        `extra`: further arguments of the pipeline.
        """
        self._check_counts(request)
        self._check_degree(request)
        prompt = {"prompt": request.prompt} if takes_prompt(self.model) else {}
        arguments = {**prompt, **self._passed_on(request), **extra}
        sides = self._sides(request)
        if uploads.images:
            arguments |= with_uploads(self.model, sides, uploads)
            size: tuple[int, int] | None = uploaded_size(self.model, arguments)
        else:
            self._check_without_image(sides)
            arguments |= sides
            size = self.model.size(arguments)
        if size is None:
            raise RequestError("this model has no size of its own: give size", param="size", code="invalid_size")
        self._check_size(size[1], size[0], is_given=bool(sides))
        _check_format(size[1], size[0], getattr(request, "output_format", None) or "png")
        plan = self._plan(request)
        self._check(arguments, self.served.plan if plan is None else plan)
        decodes = getattr(request, "previews", None) == "vae"
        if decodes and getattr(request, "partial_count", 0):
            self._check_decoder(plan)
        seed = secrets.randbelow(RANDOM_SEEDS) if request.seed is None else request.seed
        return ImageCall(
            arguments=arguments,
            seed=seed,
            count=getattr(request, "n", None) or 1,
            size=(size[1], size[0]),
            plan=plan,
            degree=None if isinstance(plan, Plan) else request.degree,
            partial_images=getattr(request, "partial_count", 0),
            decodes_partial_images=decodes,
            loras=self.loras.scales_of(request.lora),
        )

    def _check_decoder(self, plan: Plan | str | None) -> None:
        """Raise RequestError where partial images cannot be decoded, which else the call would find out."""
        reason = self.why_no_decoder
        if not reason and isinstance(plan, Plan) and isinstance(plan.strategy, StructureGuidance):
            reason = f"strategy {plan.strategy.name} has latents of its own on each rank: use previews of the latents"
        if reason:
            raise RequestError(f"previews='vae': {reason}", param="previews", code="unsupported_parameter")

    def _check_counts(self, request: PipelineFields) -> None:
        limits = self.limits
        _check_most(STEPS, self._steps(request) or self.model.parameters.get(STEPS) or 0, limits.steps)
        _check_most("n", getattr(request, "n", None) or 1, limits.images)
        for name in ("prompt", "negative_prompt"):
            _check_most(f"{name}, characters", len(getattr(request, name) or ""), limits.characters)

    def _steps(self, request: PipelineFields) -> int | None:
        """Return the steps that a request asks for, by their number or else by `quality`."""
        known = self.served.quality_steps if STEPS in self.model.parameters else {}
        return request.num_inference_steps or known.get(getattr(request, "quality", None) or "")

    def _check_degree(self, request: PipelineFields) -> None:
        """Raise RequestError for more devices than there are, and where a plan says how many work on a request."""
        degree, plan, most = request.degree, self.served.plan, self.devices
        if degree is None:
            return
        reason = ""
        if degree > most:
            reason = f"there are {most} devices: use 1 to {most}"
        elif request.plan not in (None, "auto"):
            reason = "plan says how many devices work on it: give one of them"
        elif isinstance(plan, Plan) and (plan.divides_weights or request.plan is None):
            way_out = "leave it out" if plan.divides_weights else "leave it out, or add plan=auto"
            reason = f"the server's plan, {plan}, says how many devices work on a request: {way_out}"
        if reason:
            raise RequestError(f"degree={degree}: {reason}", param="degree")

    def _check_without_image(self, sides: Mapping[str, int]) -> None:
        if self.needs_image:
            raise RequestError(
                f"this model, a {self.model.pipeline}, begins with an image: send it as a file of a form, to "
                "/v1/images/edits or as input_reference of /v1/videos",
                param="image",
                code="missing_parameter",
            )
        if sides and "height" not in self.model.parameters:
            raise RequestError("this model makes images of one size: leave size out", param="size", code="invalid_size")

    def _passed_on(self, request: PipelineFields) -> dict[str, Any]:
        given = {name: value for name in PASSED_ON if (value := getattr(request, name)) is not None}
        if (steps := self._steps(request)) is not None:
            given[STEPS] = steps
        for name in given:
            if name not in self.model.parameters:
                raise RequestError(
                    f"{name}: this model, a {self.model.pipeline}, does not take it; leave it out",
                    param=name,
                    code="unsupported_parameter",
                )
        return given

    def _sides(self, request: PipelineFields) -> dict[str, int]:
        """Return height and width as far as they are given."""
        sides = {name: side for name in ("height", "width") if (side := getattr(request, name)) is not None}
        if request.size in (None, "auto"):
            return sides
        if sides:
            raise RequestError("size and height or width: give one of them", param="size", code="invalid_size")
        found = SIZE.fullmatch(request.size or "")
        if found is None:
            raise RequestError(
                f"size={request.size[:40] if request.size else ''!r}: write it as WIDTHxHEIGHT, such as 512x512",
                param="size",
                code="invalid_size",
            )
        return {"height": int(found[2]), "width": int(found[1])}

    def _check_size(self, width: int, height: int, *, is_given: bool) -> None:
        """Raise RequestError for more pixels than are made, and for a size that is given and does not go."""
        unit, most = self.model.size_unit, self.limits.pixels
        if width * height > most:
            raise RequestError(
                f"size {width}x{height}: {width * height} pixels, and at most {most} are made",
                param="size",
                code="invalid_size",
            )
        if not is_given:
            return
        nearest = [max(round(side / unit) * unit, -(-MIN_SIDE // unit) * unit) for side in (width, height)]
        if width % unit or height % unit or min(width, height) < MIN_SIDE:
            raise RequestError(
                f"size {width}x{height}: both sides must be multiples of {unit}, from {MIN_SIDE} on; the nearest is "
                f"{nearest[0]}x{nearest[1]}",
                param="size",
                code="invalid_size",
            )

    def _plan(self, request: PipelineFields) -> Plan | str | None:
        """Return the plan that a request asks for; None if it asks for none."""
        if request.plan is None and request.strategy is None:
            return None
        name = "strategy" if request.plan is None else "plan"
        if isinstance(self.served.plan, Plan) and self.served.plan.divides_weights:
            raise RequestError(
                f"{name}: the server's plan, {self.served.plan}, divides weights, so that requests cannot have another",
                param=name,
            )
        try:
            if request.strategy is None and request.plan == "auto":
                return "auto"
            plan = self._parsed(request)
            plan.check_strategy()
            if plan.world_size > self.devices:
                plan.check_devices(self.devices)
        except PlanError as error:
            raise RequestError(str(error), param=name) from None
        if plan.data > 1 or plan.divides_weights:
            raise RequestError(
                f"plan {plan}: a request may choose cfg, patch and a strategy only: leave the rest out", param=name
            )
        return plan

    def _parsed(self, request: PipelineFields) -> Plan:
        if request.plan not in (None, "auto"):
            return Plan.parse(request.plan or "", strategy=request.strategy)
        if isinstance(self.served.plan, Plan):
            raise PlanError(f"strategy without plan: the server's plan is {self.served.plan}; give both")
        most = min(self.served.devices_of("auto"), self.devices)
        return Plan(patch=request.degree or most, strategy=request.strategy)

    def _check(self, arguments: Mapping[str, Any], plan: Plan | str) -> None:
        try:
            check_call(self.model, arguments)
            if isinstance(plan, Plan):
                check_plan_for(self.model, plan, arguments, self.served.devices)
        except PlanError as error:
            raise RequestError(str(error), param=field_of(str(error))) from None


def takes_prompt(model: PipelineInfo) -> bool:
    """Return whether the call of a model has a prompt; else that of requests, which all have one, is ignored."""
    return "prompt" in model.parameters or model.takes_any


def _check_format(width: int, height: int, output_format: OutputFormat) -> None:
    """Raise RequestError for an image that could be made, and not be written in its format."""
    if output_format in MOST_SIDE and max(width, height) > (most := MOST_SIDE[output_format]):
        raise RequestError(
            f"size {width}x{height}: {output_format.upper()} has at most {most} pixels a side: use png, or less",
            param="size",
            code="invalid_size",
        )


def _check_most(name: str, value: int, most: int) -> None:
    if value > most:
        param = name.partition(",")[0]
        raise RequestError(f"{name}: {value}, and at most {most} are accepted", param=param, code="above_limit")
