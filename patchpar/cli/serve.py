"""`patchpar serve MODEL`: images, videos or streams over HTTP, in the format of OpenAI's interface."""

import importlib.util
from dataclasses import dataclass, fields
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from patchpar.cli.console import friendly_errors
from patchpar.cli.demo import demo_package
from patchpar.cli.flag_values import batch_of, check_deadline, recovers, refuse_torchrun
from patchpar.cli.flags import (
    DEADLINE,
    Deadline,
    Debug,
    Devices,
    Format,
    SecretFile,
    TrustedNetwork,
    Variant,
    given,
    plan_of,
    trust_between_hosts,
)
from patchpar.cli.folded_help import more
from patchpar.cli.pipeline_changes import LoraFlag
from patchpar.cli.stream.flags import is_streamed
from patchpar.errors import PlanError
from patchpar.launch.devices import devices_of_plan, resolve_devices
from patchpar.plan.scalars import whole_in

if TYPE_CHECKING:
    from patchpar.serving.api_keys import ApiKeys
    from patchpar.serving.lora_registry import RegisteredLora
    from patchpar.serving.service import ImageService
    from patchpar.serving.settings import ServerSettings
    from patchpar.serving.streams.stream_service import StreamService

PAGE_MODULES = ("server", "workers", "shared_page")
PAGE_PATHS = ("/app",)
NEEDED = ("fastapi", "uvicorn", "prometheus_client", "python_multipart")
OF_STREAMS = ("stream_slots", "max_seconds")
OF_IMAGES = (
    *("plan", "per_request", "quality", "task", "lora", "batch", "batch_wait_ms", "policy", "recover", "max_queue"),
    *("max_per_key", "max_per_user", "max_pixels", "max_steps", "max_frames", "max_kept", "max_kept_gb", "ttl"),
    *("files", "journal", "admin_key_file", "secret_file", "trusted_network"),
)
"""Flags that a server of the other kind has no use for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeFlags:
    """The flags of `serve`."""

    model: Annotated[str, typer.Argument(help="A folder, a hub id, embedded, embedded-dit or embedded-face.")]
    devices: Devices = "auto"
    plan: Annotated[str, typer.Option(help="Plan of requests that name none.")] = "auto"
    per_request: Annotated[int | None, typer.Option(help="Devices for a request, with plan auto.")] = None
    dtype: Format = None
    quality: Annotated[str | None, more("Steps by the field quality of requests: low=8,high=30.")] = None
    task: Annotated[str | None, more("image-to-image: edits by a text-to-image model.")] = None
    lora: Annotated[list[str] | None, more("NAME=PATH[:scale], a LoRA that requests may select; repeatable.")] = None
    variant: Variant = None
    host: Annotated[str, typer.Option(help="Address; others than this machine's need keys.")] = "127.0.0.1"
    port: Annotated[int, typer.Option(help="Port; 0: any free port.")] = 8000
    api_key_file: Annotated[Path | None, typer.Option(help="File with an API key on each line.")] = None
    admin_key_file: Annotated[Path | None, more("The same for /admin; without it there is none.")] = None
    stream_slots: Annotated[int | None, more("Streams at once, of a streaming model; default: 1.")] = None
    max_seconds: Annotated[float, more("Longest stream, in seconds.")] = 3600.0
    app: Annotated[bool, more("Also the page of `patchpar app`, at /app, on the same queue.", "--app")] = False
    app_auth: Annotated[str | None, more("Its log-in: NAME:PASSWORD, or a file of these.")] = None
    max_queue: Annotated[int, typer.Option(help="Requests that may wait; more are refused.")] = 32
    max_per_key: Annotated[int | None, more("Requests that may wait of one API key; default: --max-queue.")] = None
    max_per_user: Annotated[int | None, more("The same of one `user` of a key.")] = None
    batch: Annotated[str, more("Requests of small images that are made in one call: 1, none; auto, 8.")] = "1"
    batch_wait_ms: Annotated[int, more("Milliseconds for which an idle server waits for more of them.")] = 0
    policy: Annotated[str, more("Which request is next: latency, throughput, deadline.")] = "latency"
    recover: Annotated[str, more("off: a request that loses a worker fails, instead of going on.")] = "on"
    max_pixels: Annotated[int, more("Largest image, in pixels.")] = 2048 * 2048
    max_steps: Annotated[int, more("Most denoising steps of an image.")] = 150
    max_frames: Annotated[int, more("Longest video, in frames.")] = 257
    max_kept: Annotated[int, more("Results of jobs and videos that are kept.")] = 256
    max_kept_gb: Annotated[float, more("GB that they take in memory and files.")] = 4.0
    ttl: Annotated[float, more("Seconds for which they are kept.")] = 3600.0
    files: Annotated[
        Path | None,
        more("Folder of videos and linked images; default for videos: one that ends with the server."),
    ] = None
    journal: Annotated[Path | None, more("Folder for requests that do not finish before the end.")] = None
    grace: Annotated[float, more("Seconds to finish requests after a signal; a second ends it.")] = 30.0
    deadline: Deadline = DEADLINE
    secret_file: SecretFile = None
    trusted_network: TrustedNetwork = False
    debug: Debug = False

    @property
    def trust(self) -> dict[str, Any]:
        """What hosts of a Ray cluster know one another by."""
        return trust_between_hosts(self.secret_file, is_trusted=self.trusted_network)


def serve_images(request: ServeFlags) -> None:
    """Serve images, videos or streams over HTTP."""
    with friendly_errors(request.debug):
        check_deadline(request.deadline)
        if request.app_auth is not None and not request.app:
            raise PlanError("--app-auth is the log-in of the page of --app: add --app, or leave it out")
        missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
        if missing:
            raise PlanError(f"serve needs {', '.join(missing)}: pip install 'patchpar[serve]'")
        service = _service(request)
        from patchpar.models.quiet_libraries import silence_command
        from patchpar.serving.server import serve

        devices = service.served.devices
        typer.echo(f"Loading {service.name} on {', '.join(devices)}.", err=True)
        silence_command(list(devices))
        page = _page(request, service) if request.app else None
        ending = partial(typer.echo, "Finishing what was accepted.", err=True)
        serve(service, partial(_announce, service.route), ending, page)


def _page(request: ServeFlags, service: "ImageService | StreamService") -> Any:
    """Return the page of `patchpar app` on the queue and the workers of a service of images. Raises PlanError."""
    from patchpar.serving.service import ImageService

    if not isinstance(service, ImageService):
        raise PlanError("--app: the page is for models of images: leave it out")
    if request.trust:
        raise PlanError(
            "--app with --secret-file or --trusted-network: tabs of the page start workers of their own, on this "
            "machine: leave --app out"
        )
    demo = demo_package()
    server, workers, shared = (import_module(f"{demo.__name__}.{name}") for name in PAGE_MODULES)
    users = server.read_users(request.app_auth, "--app-auth")
    if service.settings.keys and not users:
        raise PlanError("--app with --api-key-file: browsers send no API keys; add --app-auth NAME:PASSWORD")
    address = server.Address(host=request.host, port=request.port, users=users)
    options = {name: value for name, value in service.served.options.items() if name != "deadline"}
    try:
        workers.TASK.check_model(request.model, options)
    except PlanError as error:
        raise PlanError(f"--app: {error}; or leave --app out") from error
    setup = workers.AppConfig(
        model=request.model,
        devices=resolve_devices(list(service.served.devices)),
        options=options,
        deadline=request.deadline,
    )
    return shared.SharedPage(setup, address, service.append_page_job, lambda: service.generator.pipe)


def _service(request: ServeFlags) -> "ImageService | StreamService":
    """Return the service of the model, which is not loaded yet. Raises PlanError."""
    from patchpar.serving.settings import ServedModel

    loading = given(torch_dtype=request.dtype, variant=request.variant, task=request.task)
    is_stream = is_streamed(request.model)
    _check_kind(request, loading, is_stream)
    plan = plan_of(request.plan, None, request.devices)
    served = ServedModel(
        model=request.model,
        devices=_names(request, plan),
        plan=plan,
        per_request=request.per_request,
        options={**loading, **given(deadline=request.deadline), **request.trust},
        measured=_measured(request, plan),
        loras=_loras(request.lora),
        batch=batch_of(request.batch),
        batch_wait=request.batch_wait_ms / 1000,
        recovers=recovers(request.recover),
        quality_steps=_quality(request),
    )
    settings = _settings(request)
    if is_stream:
        from patchpar.serving.streams.stream_service import StreamService

        return StreamService(served, settings, 1 if request.stream_slots is None else request.stream_slots)
    from patchpar.serving.generation import ImageGenerator
    from patchpar.serving.service import ImageService

    return ImageService(ImageGenerator(served), settings)


def _check_kind(request: ServeFlags, loading: dict[str, Any], is_streamed: bool) -> None:
    """Raise PlanError for a model that cannot be served, and for flags of the other kind of server."""
    if not is_streamed:
        from patchpar.serving.served_task import check_servable

        check_servable(request.model, loading)
    defaults = {each.name: each.default for each in fields(ServeFlags)}
    for name in OF_IMAGES if is_streamed else OF_STREAMS:
        flag, value = f"--{name.replace('_', '-')}", getattr(request, name)
        if value == defaults[name]:
            continue
        if is_streamed:
            raise PlanError(f"{flag} {value}: {request.model} is a streaming model, without {flag}: leave it out")
        raise PlanError(
            f"{flag} {value}: {request.model} is no streaming model, whose folder has a stream.json: leave {flag} out, "
            "or serve a streaming model, such as embedded-face"
        )


def _settings(request: ServeFlags) -> "ServerSettings":
    from patchpar.serving.settings import KeptResults, RequestLimits, ServerSettings

    return ServerSettings(
        host=request.host,
        port=request.port,
        keys=_keys(request.api_key_file, "--api-key-file"),
        admin_keys=_keys(request.admin_key_file, "--admin-key-file"),
        max_queue=request.max_queue,
        max_per_key=request.max_per_key,
        max_per_user=request.max_per_user,
        policy=request.policy,
        grace=request.grace,
        journal=request.journal,
        page_paths=PAGE_PATHS if request.app else (),
        kept=KeptResults(
            seconds=request.ttl, count=request.max_kept, gigabytes=request.max_kept_gb, folder=request.files
        ),
        limits=RequestLimits(
            pixels=request.max_pixels,
            steps=request.max_steps,
            frames=request.max_frames,
            stream_seconds=request.max_seconds,
        ),
    )


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


def _quality(request: ServeFlags) -> dict[str, int]:
    """Return steps by quality. Raises PlanError for text of another form, and more steps than are made."""
    found = dict[str, int]()
    for part in request.quality.split(",") if request.quality else ():
        name, _, number = part.strip().partition("=")
        steps = whole_in(number)
        if steps is None:
            raise PlanError(f"--quality {request.quality:.80}: write it as low=8,high=30, with numbers of steps")
        if steps > request.max_steps:
            raise PlanError(f"--quality {part.strip()}: at most {request.max_steps} steps are made, see --max-steps")
        if name in found:
            raise PlanError(f"--quality {request.quality} has {name} twice: once is enough")
        found[name] = steps
    return found


def _measured(request: ServeFlags, plan: object) -> tuple[object, ...]:
    """Return where seconds of steps are kept, and of what they are."""
    from patchpar.shard.verification_cache import VerificationCache

    facts = {"model": request.model, "dtype": request.dtype, "plan": str(plan), "devices": _names(request, plan)}
    return VerificationCache.in_home("costs"), facts


def _names(request: ServeFlags, plan: object) -> tuple[str, ...]:
    """Return the names of the devices; with a plan and "auto", as many as the plan takes."""
    refuse_torchrun("serve")
    count = getattr(plan, "world_size", None) if request.devices == "auto" else None
    return (resolve_devices(request.devices) if count is None else devices_of_plan(plan, count)).names


def _announce(route: str, url: str, seconds: float) -> None:
    typer.echo(f"Ready after {seconds:.0f} s; ctrl-C ends it: {url}{route}")
