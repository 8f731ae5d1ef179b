"""`patchpar app`: the web demo, a page in the browser."""

import importlib.util
import sys
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import typer

from patchpar.cli.console import friendly_errors
from patchpar.cli.flag_values import check_deadline, refuse_torchrun
from patchpar.cli.flags import DEADLINE, FACE, Deadline, Debug, Format, Model, given
from patchpar.errors import PlanError
from patchpar.models.files import HUB_NAME, path_of
from patchpar.models.task import RequestedTask
from patchpar.web.server import check_port

TASK = RequestedTask(verb="app")
NAME = "patchpar_app"
"""Name under which the demo's package is imported, from any folder: the name `app` could clash."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AppFlags:
    """The flags of `app`."""

    model: Model = "embedded"
    devices: Annotated[str, typer.Option(help="As for generate; without a GPU, auto is two CPU workers.")] = "auto"
    face: Annotated[str, typer.Option(help="Folder or hub name of a talking-face model.")] = FACE
    host: Annotated[str, typer.Option(help="127.0.0.1: this machine only; 0.0.0.0: any machine.")] = "127.0.0.1"
    port: Annotated[int, typer.Option(help="0: any free port.")] = 7860
    auth: Annotated[
        str | None, typer.Option(help="NAME:PASSWORD, or a file with such a line for each user.", show_default=False)
    ] = None
    open: Annotated[bool, typer.Option("--open", help="Serve other machines without a log-in.")] = False
    dtype: Format = None
    variant: Annotated[str | None, typer.Option(help="Variant of the weight files, such as fp16.")] = None
    deadline: Deadline = DEADLINE
    debug: Debug = False


def serve_app(request: AppFlags) -> None:
    """Serve the web demo until ctrl-C."""
    with friendly_errors(request.debug):
        refuse_torchrun("app")
        check_deadline(request.deadline)
        check_port(request.port, "--port")
        typer.echo("Starting the page.", err=True)  # importing what it needs takes seconds
        TASK.check_model(request.model, _loading(request))  # before the check for gradio, which can be installed
        demo = demo_package()
        server, workers = (import_module(f"{demo.__name__}.{name}") for name in ("server", "workers"))
        address = server.Address(
            host=request.host, port=request.port, users=server.read_users(request.auth), is_open=request.open
        )
        devices, options = workers.devices_of(request.devices), _loading(request)
        setup = workers.AppConfig(
            model=request.model,
            devices=devices,
            face=_face(request),
            options=options,
            deadline=request.deadline,
            chooses_models=address.is_local,
        )
        server.serve(setup, address, _print_address, lambda: typer.echo("Ending the page and its workers.", err=True))


def _print_address(url: str) -> None:
    typer.echo(f"Open {url} in a browser. Its workers are starting meanwhile; ctrl-C ends it.")


def _loading(request: AppFlags) -> dict[str, Any]:
    return given(torch_dtype=request.dtype, variant=request.variant)


def _face(request: AppFlags) -> str:
    """The model of the face, which is loaded, or downloaded, at its first stream. Raises PlanError."""
    if request.face != FACE and not path_of(request.face).is_dir() and not HUB_NAME.fullmatch(request.face):
        raise PlanError(f"--face {request.face}: there is no such folder; give one, or a hub name such as org/model")
    return request.face


def demo_package() -> ModuleType:
    """Return the demo's package, from the installed package or from a clone. Raises PlanError without gradio."""
    if importlib.util.find_spec("gradio") is None:
        raise PlanError("the demo needs gradio, which is not installed: pip install 'patchpar[app]'")
    if NAME in sys.modules:
        return sys.modules[NAME]
    package = Path(__file__).parent.parent
    for folder in (package / "app", package.parent / "app"):
        if (folder / "__init__.py").is_file():
            return _imported(folder)
    raise PlanError(f"the demo is missing: neither {package} nor {package.parent} has a folder app")


def _imported(folder: Path) -> ModuleType:
    locations = [str(folder)]
    found = importlib.util.spec_from_file_location(NAME, folder / "__init__.py", submodule_search_locations=locations)
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    sys.modules[NAME] = module
    found.loader.exec_module(module)
    return module
