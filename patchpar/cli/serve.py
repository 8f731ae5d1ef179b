"""`patchpar serve MODEL`: images over HTTP, in the format of OpenAI's image interface."""

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from patchpar.cli.console import friendly_errors
from patchpar.cli.flags import DEADLINE, Deadline, Debug, Devices, Format, check_deadline, given, plan_of
from patchpar.cli.folded_help import more
from patchpar.cli.pipeline_changes import LoraFlag
from patchpar.errors import PlanError

if TYPE_CHECKING:
    from patchpar.serving.api_keys import ApiKeys
    from patchpar.serving.lora_registry import RegisteredLora

NEEDED = ("fastapi", "uvicorn", "prometheus_client", "python_multipart")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeFlags:
    """The flags of `serve`."""

    model: Annotated[str, typer.Argument(help="A folder, a hub id, 'embedded' or 'embedded-dit'.")]
    devices: Devices = "auto"
    plan: Annotated[str, typer.Option(help="Plan of requests that name none.")] = "auto"
    per_request: Annotated[int | None, typer.Option(help="Devices for a request, with plan auto.")] = None
    dtype: Format = None
    task: Annotated[str | None, more("image-to-image: edits by a text-to-image model.")] = None
    lora: Annotated[list[str] | None, more("NAME=PATH[:scale], a LoRA that requests may select; repeatable.")] = None
    variant: Annotated[str | None, more("Variant of the weight files, such as fp16.")] = None
    host: Annotated[str, typer.Option(help="Address; others than this machine's need keys.")] = "127.0.0.1"
    port: Annotated[int, typer.Option(help="Port; 0: any free port.")] = 8000
    api_key_file: Annotated[Path | None, typer.Option(help="File with an API key on each line.")] = None
    admin_key_file: Annotated[Path | None, more("The same for /admin; without it there is none.")] = None
    max_queue: Annotated[int, typer.Option(help="Requests that may wait; more are refused.")] = 32
    policy: Annotated[str, more("Which request is next: latency, throughput, deadline.")] = "latency"
    max_pixels: Annotated[int, more("Largest image, in pixels.")] = 2048 * 2048
    max_steps: Annotated[int, more("Most denoising steps of an image.")] = 150
    max_frames: Annotated[int, more("Longest video, in frames.")] = 257
    max_kept: Annotated[int, more("Results of jobs and videos that are kept.")] = 256
    ttl: Annotated[float, more("Seconds for which they are kept.")] = 3600.0
    files: Annotated[
        Path | None,
        more("Folder of videos; default: one that ends with the server."),
    ] = None
    grace: Annotated[float, more("Seconds to finish requests after a signal; a second ends it.")] = 30.0
    deadline: Deadline = DEADLINE
    debug: Debug = False


def serve_images(request: ServeFlags) -> None:
    """Serve images over HTTP, to clients of OpenAI's interface."""
    with friendly_errors(request.debug):
        check_deadline(request.deadline)
        loading = given(torch_dtype=request.dtype, variant=request.variant, task=request.task)
        options = {**loading, **given(deadline=request.deadline)}
        missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
        if missing:
            raise PlanError(f"serve needs {', '.join(missing)}: pip install 'patchpar[serve]'")
        from patchpar.serving.served_task import check_servable

        check_servable(request.model, loading)
        from patchpar.models.quiet_libraries import silence_command
        from patchpar.serving.generation import ImageGenerator
        from patchpar.serving.server import serve
        from patchpar.serving.service import ImageService
        from patchpar.serving.settings import KeptResults, RequestLimits, ServedModel, ServerSettings

        plan = plan_of(request.plan, None, request.devices)
        served = ServedModel(
            model=request.model,
            devices=_names(request, plan),
            plan=plan,
            per_request=request.per_request,
            options=options,
            measured=_measured(request, plan),
            loras=_loras(request.lora),
        )
        settings = ServerSettings(
            host=request.host,
            port=request.port,
            keys=_keys(request.api_key_file, "--api-key-file"),
            admin_keys=_keys(request.admin_key_file, "--admin-key-file"),
            max_queue=request.max_queue,
            policy=request.policy,
            grace=request.grace,
            kept=KeptResults(seconds=request.ttl, count=request.max_kept, folder=request.files),
            limits=RequestLimits(pixels=request.max_pixels, steps=request.max_steps, frames=request.max_frames),
        )
        typer.echo(f"Loading {served.name} on {', '.join(served.devices)}.", err=True)
        silence_command(list(served.devices))
        service = ImageService(ImageGenerator(served), settings)
        serve(service, _announce, lambda: typer.echo("Finishing what was accepted.", err=True))


def _keys(file: Path | None, flag: str) -> "ApiKeys":
    from patchpar.serving.api_keys import ApiKeys

    return ApiKeys() if file is None else ApiKeys.read(file, flag)


def _loras(texts: "list[str] | None") -> "tuple[RegisteredLora, ...]":
    from patchpar.serving.lora_registry import RegisteredLora

    found = []
    for text in texts or ():
        name, equals, path = text.partition("=")
        if not equals or not path:
            raise PlanError(f"--lora {text}: write NAME=PATH, such as ink=ink.safetensors; requests use the name")
        flag = LoraFlag.parse(path)
        found.append(RegisteredLora(name=name, source=flag.source, scale=flag.scale))
    return tuple(found)


def _measured(request: ServeFlags, plan: object) -> tuple[object, ...]:
    """Return where seconds of steps are kept, and of what they are."""
    from patchpar.shard.verification_cache import VerificationCache

    facts = {"model": request.model, "dtype": request.dtype, "plan": str(plan), "devices": _names(request, plan)}
    return VerificationCache.in_home("costs"), facts


def _names(request: ServeFlags, plan: object) -> tuple[str, ...]:
    """Return the names of the devices; with a plan and "auto", as many as the plan takes."""
    from patchpar.launch.devices import resolve_devices
    from patchpar.launch.torchrun import torchrun_world

    if torchrun_world() is not None:
        raise PlanError("serve starts its own workers: start it without torchrun")
    count = getattr(plan, "world_size", None) if request.devices == "auto" else None
    return resolve_devices(count or request.devices).names


def _announce(url: str, seconds: float) -> None:
    typer.echo(f"Ready after {seconds:.0f} s; ctrl-C ends it: {url}/v1/images/generations")
