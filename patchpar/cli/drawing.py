"""Open the pipeline that flags ask for and call it once, with a bar that shows the steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from patchpar.cli.flags import Asked, Opened, plan_of
from patchpar.cli.speech import progress


def draw(request: Asked, arguments: Callable[[], dict[str, Any]]) -> tuple[Any, Any]:
    """(figures of the call, what the pipeline returned). `arguments` may be slow: workers start meanwhile."""
    return drawn_by(request, lambda pipe: pipe(**arguments()))


def drawn_by(request: Opened, call: Callable[[Any], Any], **options: Any) -> tuple[Any, Any]:
    """(figures of the call, what `call` made of the pipeline). `options` are of how it is loaded."""
    from patchpar import ParallelPipeline

    plan = plan_of(request.plan, request.strategy, request.devices)
    opened = {"devices": request.devices, "plan": plan, **request.for_loading(), **options}
    with progress("drawing") as step, ParallelPipeline.from_pretrained(request.model, **opened) as pipe:
        pipe.set_progress_bar_config(disable=True)
        pipe.on_step, pipe.tracing = step, request.trace is not None
        output = call(pipe)
        return pipe.last_run, output
