"""`patchpar serve MODEL`: images over HTTP, in the format of OpenAI's image interface."""

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from patchpar.cli.console import friendly_errors
from patchpar.cli.flags import DEADLINE, Deadline, Debug, Devices, Format, check_deadline, given, plan_of
from patchpar.errors import PlanError
from patchpar.models.task import RequestedTask

NEEDED = ("fastapi", "uvicorn", "prometheus_client")
TASK = RequestedTask(verb="serve")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeFlags:
    """The flags of `serve`."""

    model: Annotated[str, typer.Argument(help="A folder, a hub id, 'embedded' or 'embedded-dit'.")]
    devices: Devices = "auto"
    plan: Annotated[str, typer.Option(help="Plan of requests that name none.")] = "auto"
    per_request: Annotated[int | None, typer.Option(help="Devices for a request, with plan auto.")] = None
    dtype: Format = None
    variant: Annotated[str | None, typer.Option(help="Variant of the weight files, such as fp16.")] = None
    host: Annotated[str, typer.Option(help="Address; others than this machine's need keys.")] = "127.0.0.1"
    port: Annotated[int, typer.Option(help="Port; 0: any free port.")] = 8000
    api_key_file: Annotated[Path | None, typer.Option(help="File with an API key on each line.")] = None
    max_queue: Annotated[int, typer.Option(help="Requests that may wait; more are refused.")] = 32
    max_pixels: Annotated[int, typer.Option(help="Largest image, in pixels.")] = 2048 * 2048
    max_steps: Annotated[int, typer.Option(help="Most denoising steps of an image.")] = 150
    grace: Annotated[float, typer.Option(help="Seconds to finish requests after a signal; a second ends it.")] = 30.0
    deadline: Deadline = DEADLINE
    debug: Debug = False


def serve_images(request: ServeFlags) -> None:
    """Serve images over HTTP, to clients of OpenAI's interface."""
    with friendly_errors(request.debug):
        check_deadline(request.deadline)
        options = given(torch_dtype=request.dtype, variant=request.variant, deadline=request.deadline)
        missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
        if missing:
            raise PlanError(f"serve needs {', '.join(missing)}: pip install 'patchpar[serve]'")
        TASK.check_model(request.model, given(torch_dtype=request.dtype, variant=request.variant))
        from patchpar.models.quiet_libraries import silence_command
        from patchpar.serving.api_keys import ApiKeys
        from patchpar.serving.generation import ImageGenerator
        from patchpar.serving.server import serve
        from patchpar.serving.service import ImageService
        from patchpar.serving.settings import RequestLimits, ServedModel, ServerSettings

        keys = ApiKeys() if request.api_key_file is None else ApiKeys.read(request.api_key_file)
        plan = plan_of(request.plan, None, request.devices)
        served = ServedModel(
            model=request.model,
            devices=_names(request, plan),
            plan=plan,
            per_request=request.per_request,
            options=options,
        )
        settings = ServerSettings(
            host=request.host,
            port=request.port,
            keys=keys,
            max_queue=request.max_queue,
            grace=request.grace,
            limits=RequestLimits(pixels=request.max_pixels, steps=request.max_steps),
        )
        typer.echo(f"Loading {served.name} on {', '.join(served.devices)}.", err=True)
        silence_command(list(served.devices))
        service = ImageService(ImageGenerator(served), settings)
        serve(service, _announce, lambda: typer.echo("Finishing what was accepted.", err=True))


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
