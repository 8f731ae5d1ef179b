"""HTML of messages, statistics and tables. Text from users and models is escaped here, and nowhere else."""

from collections.abc import Sequence
from html import escape
from math import ceil

from patchpar import Run
from patchpar.plan.byte_sizes import readable_bytes

from .job_queue import JobView

MINUTE = 90  # seconds that are given as such; more are given as minutes
SCROLLING = '<div class="wide" tabindex="0">'  # scrolls sideways within a narrow page, also by the keyboard


def status(view: JobView | None, hint: str = "") -> str:
    """State of a job: one line and a progress bar; `hint` before the first job."""
    if view is None:
        return notice(hint) if hint else ""
    if view.state == "waiting":
        before = "1 job ahead" if view.ahead == 1 else f"{view.ahead} jobs ahead"
        return _line("waiting", f"Waiting: {before}." if view.ahead else "Waiting for the workers.")
    if view.state == "running":
        return _bar(view)
    if view.state == "failed":
        return failure(view.error)
    return _line(view.state, {"done": "Done.", "cancelled": "Cancelled. The workers are free."}[view.state])


def failure(message: str) -> str:
    """An error message."""
    return _line("failed", message)


def notice(message: str) -> str:
    """A notice."""
    return _line("idle", message)


def facts(run: Run, why: str, unknown: Sequence[str] = ()) -> str:
    """Run statistics: seconds, plan, bytes. `unknown`: words of the prompt that the embedded model has not learnt."""
    sent = sum(run.bytes_per_step)
    vae = sum(run.vae_bytes)
    rows = [
        ("Time", f"{run.seconds:.1f} s for {run.steps} steps"),
        ("Plan", str(run.plan)),
        ("Why", why.partition(": ")[2] or why),
        (
            "Sent",
            f"{readable_bytes(sent)} a step by all ranks" + (f", {readable_bytes(vae)} for the VAE" if vae else ""),
        ),
        (
            "Longest wait on any rank",
            f"{max((sum(rank.seconds_waited.values()) for rank in run.ranks), default=0.0):.2f} s",
        ),
    ]
    if unknown:
        rows.insert(0, ("Not understood", f"{', '.join(unknown)}: the embedded model knows the words of its examples"))
    if run.exact_steps is not None:
        rows.append(("Exact steps", f"{run.exact_steps} of {run.steps}"))
    if run.stale_bytes:
        rows.append(("Stale state", f"{readable_bytes(run.stale_bytes)} kept from the last step"))
    return pairs(rows)


def pairs(rows: Sequence[tuple[str, str]]) -> str:
    """A list of names and values."""
    body = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in rows)
    return f'<dl class="facts">{body}</dl>'


def table(
    head: Sequence[str], rows: Sequence[Sequence[str]], marked: int | None = None, *, stacked: bool = True
) -> str:
    """A table; row `marked` stands out. A narrow page shows the cells of a row one below another if it is `stacked`."""
    top = "".join(f"<th>{escape(name)}</th>" for name in head)
    body = "".join(
        f"<tr{_marked(number == marked)}>{''.join(_cell(*cell) for cell in zip(head, row, strict=True))}</tr>"
        for number, row in enumerate(rows)
    )
    kind = "figures stacked" if stacked else "figures"
    return f'{SCROLLING}<table class="{kind}"><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'


def _cell(name: str, text: str) -> str:
    return f'<td data-name="{escape(name)}">{escape(text)}</td>'


def _marked(is_marked: bool) -> str:
    return ' class="marked"' if is_marked else ""


def _line(kind: str, message: str) -> str:
    role = "alert" if kind == "failed" else "status"
    return f'<div class="state {kind}" role="{role}">{escape(message)}</div>'


def _bar(view: JobView) -> str:
    if not view.step:
        return _line("running", f"{view.note or 'working'} …")
    percent = 100 * view.step / max(1, view.steps)
    text = f"{view.note}: step {view.step} of {view.steps}{_left(view.seconds_left)}"
    return (
        f'<div class="state running" role="status">{escape(text)}'
        f'<div class="bar"><div style="width:{percent:.0f}%"></div></div></div>'
    )


def _left(seconds: float | None) -> str:
    """What is added to a step that is not the last."""
    if not seconds:
        return ""
    return f", about {ceil(seconds)} s left" if seconds < MINUTE else f", about {seconds / 60:.0f} min left"


def caption(text: str) -> str:
    """Small print."""
    return f'<span class="caption">{escape(text)}</span>'
