"""One frozen dataclass per command: its fields are the flags. This file has those that several commands use.

Flags with the panel MORE are in the help of `--help-all` only, so that that of `--help` fits a screen.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields
from functools import wraps
from inspect import Parameter, Signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_type_hints

import typer

from patchpar.cli.flag_values import check_deadline, check_guidance, check_positive, check_seed
from patchpar.cli.folded_help import HELP_ALL, HelpAll, is_folded, more
from patchpar.cli.input_images import InputImages
from patchpar.cli.output_files import check_can_write
from patchpar.cli.pipeline_changes import check_prompts, loras_of, scheduler_name
from patchpar.cli.shutdown import ended_by_signals
from patchpar.errors import PlanError

if TYPE_CHECKING:
    from patchpar import Plan
    from patchpar.models.task import RequestedTask


Json = Annotated[bool, more("Print one JSON object, nothing else.", "--json")]
Debug = Annotated[bool, more("Show the traceback of an error.", "--debug")]
Devices = Annotated[str, typer.Option(show_default=False, help="auto, 2, cpu:N, cuda, ray:N, or names: cuda:0,cuda:2.")]
LocalDevices = Annotated[str, typer.Option(show_default=False, help="auto, 2, cpu:N, cuda, or names: cuda:0,cuda:2.")]
"""Of commands whose ranks are on this machine."""
Model = Annotated[str, typer.Option(show_default=False, help="A folder or a hub id; default: embedded.")]
Dtype = Literal["float32", "float16", "bfloat16"]
Format = Annotated[
    Dtype | None,
    more("Weights as float32, float16 or bfloat16.", metavar="<format>"),
]
Variant = Annotated[str | None, more("Variant of the weight files, such as fp16.")]
Deadline = Annotated[float, more("Seconds that a rank may stall.")]
DEADLINE = 60.0
SecretFile = Annotated[Path | None, more("Ranks on several hosts: a file with their secret.")]
TrustedNetwork = Annotated[bool, more("No secret between these hosts.", "--trusted-network")]
FACE = "embedded-face"
"""The default model of streams."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFlags:
    """Flags of model, devices and plan."""

    model: Model = "embedded"
    devices: Devices = "auto"
    plan: Annotated[str, typer.Option(show_default=False, help="auto, or axes: cfg=2,patch=2.")] = "auto"
    strategy: Annotated[str | None, typer.Option(help="How ranks exchange: name or name:key=value.")] = None
    vae: Annotated[str, more("Parallel VAE: auto, exact, tiled, rank0.")] = "auto"
    steps: Annotated[int | None, typer.Option(help="Denoising steps; default: the pipeline's own.")] = None
    guidance_scale: Annotated[float | None, more("Guidance; default: the pipeline's own.")] = None
    negative_prompt: Annotated[str | None, more("What the output should not show.")] = None
    lora: Annotated[
        list[str] | None, typer.Option(metavar="PATH[:scale]", help="A LoRA; several times for several.")
    ] = None
    scheduler: Annotated[str | None, more("Scheduler of diffusers, such as DDIMScheduler.")] = None
    dtype: Format = None
    variant: Variant = None
    graphs: Annotated[bool | None, more("Steps as CUDA graphs; default: on several GPUs.")] = None
    trace: Annotated[Path | None, more("Write a timeline of all ranks, for Perfetto.")] = None
    deadline: Deadline = DEADLINE
    json: Json = False
    debug: Debug = False

    def check_counts(self, *names: str) -> None:
        """Raise PlanError for a count or size below 1, an invalid deadline, a trace that cannot be written, a bad LoRA.

        And for a guidance scale that is not finite, and a scheduler that diffusers does not have.
        """
        check_positive(self, "steps", *names)
        check_guidance(self.guidance_scale)
        check_deadline(self.deadline)
        if self.trace is not None:
            check_can_write(self.trace, "--trace", "trace.json")
        loras_of(self.lora)
        if self.scheduler is not None:
            scheduler_name(self.scheduler)

    def check_model(self, task: RequestedTask) -> Path | None:
        """Return the folder of the model, None of one of the hub. Raises PlanError if it shows that it cannot do it."""
        return task.check_model(self.model, self.for_loading())

    def for_loading(self) -> dict[str, Any]:
        """Return keyword arguments of `ParallelPipeline.from_pretrained`, without devices and plan."""
        graphs = "auto" if self.graphs else self.graphs
        return given(torch_dtype=self.dtype, variant=self.variant, vae=self.vae, deadline=self.deadline, graphs=graphs)

    def for_sampling(self) -> dict[str, Any]:
        """Return steps and guidance by diffusers' names."""
        return given(num_inference_steps=self.steps, guidance_scale=self.guidance_scale)

    def traced(self) -> dict[str, str]:
        """Return the path of the trace, for the report; empty without --trace."""
        return {} if self.trace is None else {"trace": str(self.trace)}


@dataclass(frozen=True, kw_only=True)  # no slots, so that it can stand beside another class of flags
class HostFlags(ModelFlags):
    """Flags of commands whose ranks may be on several hosts, which torchrun starts or a Ray cluster has."""

    secret_file: SecretFile = None
    trusted_network: TrustedNetwork = False

    def for_loading(self) -> dict[str, Any]:
        """Return what the hosts know one another by too."""
        return {**super().for_loading(), **trust_between_hosts(self.secret_file, is_trusted=self.trusted_network)}


@dataclass(frozen=True, slots=True, kw_only=True)
class SizedFlags(ModelFlags):
    """Flags of model, devices and plan, and of the size."""

    height: Annotated[int | None, typer.Option(help="Pixels; default: the model's own size.")] = None
    width: Annotated[int | None, typer.Option(help="Pixels; default: the model's own size.")] = None

    def check_counts(self, *names: str) -> None:
        """Check the size too. Raises PlanError."""
        ModelFlags.check_counts(self, "height", "width", *names)

    def check_model(self, task: RequestedTask) -> Path | None:
        """Check the size too, unless it is that to which an image is resized. Raises PlanError."""
        from patchpar.models.size_grid import check_sides

        folder = ModelFlags.check_model(self, task)
        if getattr(self, "image", None) is None:
            check_sides(folder, height=self.height, width=self.width)
        return folder

    def for_sampling(self) -> dict[str, Any]:
        """Return size, steps and guidance by diffusers' names."""
        return {**given(height=self.height, width=self.width), **ModelFlags.for_sampling(self)}


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageFlags(SizedFlags):
    """Flags of prompts, seed and number of images."""

    prompt: Annotated[list[str], typer.Argument(help="What to generate.")]
    seed: Annotated[int, typer.Option(help="Of the first image.")] = 0
    num_images: Annotated[int, more("Images per prompt.")] = 1
    image: Annotated[Path | None, typer.Option(help="Begin with this image (image-to-image).")] = None
    mask: Annotated[Path | None, more("With --image: white is what is generated anew.")] = None
    strength: Annotated[float | None, more("With --image: how much is changed, from 0 to 1.")] = None

    def check(self) -> None:
        """Raise PlanError for invalid flags."""
        self.check_counts("num_images")
        check_prompts(self.prompt)
        check_seed(self.seed, most=2**64 - self.images)
        InputImages.check(image=self.image, mask=self.mask, strength=self.strength)

    def task(self, verb: str) -> RequestedTask:
        """Return what is requested of the model."""
        from patchpar.models.task import RequestedTask

        return RequestedTask(
            verb=verb,
            has_image=self.image is not None,
            has_mask=self.mask is not None,
            has_strength=self.strength is not None,
            converts=True,
            per_prompt=self.num_images,
        )

    def inputs(self) -> InputImages:
        """Return the images to begin with, in the size of the flags. Raises PlanError."""
        return InputImages.read(
            image=self.image, mask=self.mask, strength=self.strength, width=self.width, height=self.height
        )

    def for_images(self) -> dict[str, Any]:
        """Return the call's arguments by diffusers' names. Images are independent: each has a generator of its own."""
        from torch import Generator

        generators = [Generator("cpu").manual_seed(self.seed + number) for number in range(self.images)]
        several = len(self.prompt) > 1
        negative = self.negative_prompt
        return given(
            prompt=self.prompt if several else self.prompt[0],
            negative_prompt=[negative] * len(self.prompt) if several and negative is not None else negative,
            num_images_per_prompt=self.num_images if self.num_images > 1 else None,  # not every pipeline takes it
            generator=generators if len(generators) > 1 else generators[0],
            **self.for_sampling(),
        )

    @property
    def images(self) -> int:
        """Number of generated images."""
        return len(self.prompt) * self.num_images


def plan_of(plan: str, strategy: str | None, devices: str) -> Plan | str:
    """Return the plan of `--plan` and `--strategy` for `ParallelPipeline`. Raises PlanError that lists valid values.

    A strategy whose result does not depend on the number of ranks needs no plan: it uses all `devices`.
    """
    from patchpar import Plan
    from patchpar.strategies import parse_strategy

    if plan != "auto":
        return read_plan(plan, strategy)
    options = None if strategy is None else parse_strategy(strategy)
    if options is None or str(options) == "exact":
        return "auto"
    if options.for_one_rank:
        return Plan(patch=_count(devices), strategy=options)
    raise PlanError(f"--strategy {strategy} needs a plan to go with: add, for example, --plan patch=2")


def read_plan(plan: str, strategy: str | None = None) -> Plan:
    """Return the plan of `--plan` and `--strategy`. Raises PlanError, also for an empty text, which is no plan here."""
    from patchpar import Plan
    from patchpar.strategies import parse_strategy

    if not plan.strip(" ,"):
        raise PlanError(
            "--plan is empty, as a variable of the shell that is not set: leave it out, or use axes, as in "
            "cfg=2,patch=2, or single for one device"
        )
    return Plan.parse(plan, strategy=None if strategy is None else parse_strategy(strategy))


def _count(devices: str) -> int:
    from patchpar.launch.devices import resolve_devices
    from patchpar.launch.torchrun_variables import torchrun_world

    return torchrun_world() or len(resolve_devices(devices).names)


def takes(command: Callable[[Any], None]) -> Callable[..., None]:
    """Return the command for typer, with one parameter for each field of the dataclass that is its `request`."""
    flags: Any = get_type_hints(command)["request"]
    hints = get_type_hints(flags, include_extras=True)
    folded = is_folded(hints)

    @wraps(command)
    def run(**values: Any) -> None:
        values.pop(HELP_ALL, None)
        with ended_by_signals():
            command(flags(**{name: _at_home(value) for name, value in values.items()}))

    parameters = [
        Parameter(
            field.name,
            Parameter.KEYWORD_ONLY,
            default=Parameter.empty if field.default is MISSING else field.default,
            annotation=hints[field.name],
        )
        for field in fields(flags)
    ]
    if folded:
        hints[HELP_ALL] = HelpAll
        parameters.append(Parameter(HELP_ALL, Parameter.KEYWORD_ONLY, default=False, annotation=HelpAll))
    run.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = hints
    return run


def _at_home(value: Any) -> Any:
    """Return a path with `~` expanded, as a shell expands `--output ~/a.png`, but not `--output=~/a.png`."""
    try:
        return value.expanduser() if isinstance(value, Path) else value
    except RuntimeError:  # of an unknown user: what reads the path says so
        return value


def trust_between_hosts(secret_file: Path | None, *, is_trusted: bool) -> dict[str, Any]:
    """Return what hosts know one another by, as keyword arguments of `ParallelPipeline.from_pretrained`."""
    return given(secret_file=secret_file, trusted_network=is_trusted or None)


def given(**values: Any) -> dict[str, Any]:
    """Return the values that are not None."""
    return {name: value for name, value in values.items() if value is not None}
