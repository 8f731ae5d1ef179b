"""The flags of `patchpar bench`, and what they select: prompts, plans and numbers of steps."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from patchpar.cli.flag_values import check_deadline, check_guidance, check_positive
from patchpar.cli.flags import (
    DEADLINE,
    Deadline,
    Debug,
    Devices,
    Format,
    Json,
    Model,
    SecretFile,
    TrustedNetwork,
    Variant,
    given,
    read_plan,
    trust_between_hosts,
)
from patchpar.cli.folded_help import more
from patchpar.cli.output_files import check_can_write
from patchpar.cli.pipeline_changes import check_prompts, loras_of, scheduler_name
from patchpar.errors import PlanError

if TYPE_CHECKING:
    from patchpar import Plan

DEFAULTS = ("exact", "fresh-edges", "pcpp", "displaced")
STEPS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchFlags:
    """The flags of `bench`."""

    prompt: Annotated[list[str] | None, typer.Argument(help="Prompts; or --prompts FILE.", show_default=False)] = None
    prompts: Annotated[Path | None, typer.Option(help="A text file: one prompt per line.")] = None
    model: Model = "embedded"
    devices: Devices = "auto"
    strategy: Annotated[list[str] | None, typer.Option(help="name or name:key=value; several times for several.")] = (
        None
    )
    ranks: Annotated[list[int] | None, typer.Option(help="Ranks of the strategies; default: all devices.")] = None
    plan: Annotated[list[str] | None, typer.Option(help="A whole plan, beside the strategies: cfg=2,patch=2.")] = None
    steps: Annotated[list[int] | None, typer.Option(help=f"Denoising steps; default: {STEPS}.")] = None
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder; what it has is not measured again.")] = Path(
        "bench"
    )
    lpips: Annotated[bool, typer.Option("--lpips", help="LPIPS too; fetches 62 MB once.")] = False
    height: Annotated[int | None, more("Pixels; default: the model's own size.")] = None
    width: Annotated[int | None, more("Pixels; default: the model's own size.")] = None
    guidance_scale: Annotated[float | None, more("Guidance; default: the pipeline's own.")] = None
    negative_prompt: Annotated[str | None, more("What the output should not show.")] = None
    seed: Annotated[int, more("Of the first prompt; the next one has the next.")] = 0
    lora: Annotated[list[str] | None, more("A LoRA; several times for several.", metavar="PATH[:scale]")] = None
    scheduler: Annotated[str | None, more("Scheduler of diffusers, such as DDIMScheduler.")] = None
    dtype: Format = None
    variant: Variant = None
    deadline: Deadline = DEADLINE
    secret_file: SecretFile = None
    trusted_network: TrustedNetwork = False
    json: Json = False
    debug: Debug = False

    def for_loading(self) -> dict[str, Any]:
        """Return keyword arguments of `ParallelPipeline.from_pretrained`, without devices."""
        loading = given(torch_dtype=self.dtype, variant=self.variant, deadline=self.deadline)
        return {**loading, **trust_between_hosts(self.secret_file, is_trusted=self.trusted_network)}

    def check(self) -> None:
        """Raise PlanError for counts and sizes below 1, a bad LoRA or scheduler, and a folder that cannot be written.

        And for a negative seed, and a guidance scale that is not finite.
        """
        check_positive(self, "height", "width", "steps", "ranks")
        if not 0 <= self.seed < 2**63:
            raise PlanError(f"--seed {self.seed}: it must be at least 0 and below 2**63")
        check_guidance(self.guidance_scale)
        check_deadline(self.deadline)
        loras_of(self.lora)
        if self.scheduler is not None:
            scheduler_name(self.scheduler)
        check_folder(self.output)

    def all_prompts(self) -> list[str]:
        """Return the prompts of the command line, then those of the file. Raises PlanError if there are none."""
        check_prompts(self.prompt or ())
        found = [*(self.prompt or ()), *(() if self.prompts is None else prompts_in(self.prompts))]
        if not found:
            raise PlanError(
                'no prompt: give one, such as patchpar bench "a tree on the left", or a file with --prompts'
            )
        return list(dict.fromkeys(found))

    def all_steps(self) -> list[int]:
        """Return the numbers of steps, each once."""
        return list(dict.fromkeys(self.steps or [STEPS]))

    def all_plans(self, devices: int) -> list[Plan]:
        """Return the plans: every strategy on every number of ranks, then whole plans. Raises PlanError."""
        from patchpar import Plan
        from patchpar.strategies import parse_strategy

        names = self.strategy or ([] if self.plan else list(DEFAULTS))
        counts = list(dict.fromkeys(self.ranks or [devices]))
        strategies = [parse_strategy(name) for name in names]
        plans = [Plan.parse(f"{each.axis}={count}", strategy=each) for count in counts for each in strategies]
        plans += [read_plan(text) for text in self.plan or ()]
        if too_large := next((plan for plan in plans if plan.world_size > devices), None):
            raise PlanError(
                f"{too_large} takes {too_large.world_size} ranks, but there are {devices} devices: name more with "
                f"--devices, such as --devices cpu:{too_large.world_size}, or fewer with --ranks"
            )
        return list(dict.fromkeys(plan for plan in plans if plan.world_size > 1 or plan.strategy.for_one_rank))


def prompts_in(path: Path) -> list[str]:
    """Return the lines of a file that are not empty and do not begin with #. Raises PlanError."""
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()  # some editors begin a file with a mark
    except (OSError, UnicodeError) as error:
        raise PlanError(f"--prompts {path}: it cannot be read as text: {error}") from error
    found = [line.strip() for line in lines]
    return [line for line in found if line and not line.startswith("#")]


def check_folder(path: Path) -> None:
    """Make the folder. Raises PlanError where files cannot be written into it, as also on a full disk."""
    try:
        path.mkdir(exist_ok=True)
    except FileExistsError as error:
        raise PlanError(f"--output {path}: it is a file; name a folder") from error
    except OSError as error:
        raise PlanError(f"--output {path}: the folder cannot be made ({error.strerror}); name another") from error
    check_can_write(path / "records.jsonl", "--output", "records.jsonl")
