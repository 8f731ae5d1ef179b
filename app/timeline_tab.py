"""The tab Timeline: compute, send and wait times of each rank in the page's last run."""

from typing import Any

import gradio as gr

from patchpar import Run
from patchpar.plan.byte_sizes import readable_bytes

from . import html, timeline
from .handler_errors import reports_errors
from .state import AppState

NOTHING = "Generate an image first, with “Record a timeline” on."


def failed(message: str) -> tuple[Any, ...]:
    """Outputs of `show` for an error."""
    return html.failure(message), gr.skip()


class TimelineTab:
    """Event handlers of the tab."""

    def __init__(self, state: AppState) -> None:
        self._state = state

    def run_of(self, owner: str) -> Run | None:
        """The page's last run."""
        return self._state.job_queue.stored(owner, "run")

    @reports_errors(lambda message: (*failed(message), gr.skip(), gr.skip(), gr.skip()))
    def refresh(self, owner: str) -> tuple[Any, ...]:
        """All outputs for the whole run, and the sliders at its ends."""
        count = timeline.count_steps(timeline.traces_of(self.run_of(owner)))
        most = max(2, count)
        first = gr.update(maximum=most, value=1, interactive=count > 1)
        last = gr.update(maximum=most, value=max(1, count), interactive=count > 1)
        return (
            *self.show(owner, 1, max(1, count)),
            first,
            last,
            gr.update(value=self.save(owner), interactive=count > 0),
        )

    @reports_errors(failed)
    def show(self, owner: str, first: int, last: int) -> tuple[str, str]:
        """(diagram, tables) of steps `first` to `last`, counted from one."""
        run = self.run_of(owner)
        traces = timeline.traces_of(run)
        if run is None or not traces:
            return html.notice(NOTHING), ""
        first, last = min(first, last), max(first, last)
        window = timeline.window_of(traces, first - 1, last - 1)
        waits = timeline.longest_waits(traces, window)
        tables = html.table(("rank", "device", "sent", "received", "waited"), totals(run), stacked=False)
        if waits:
            tables += html.table(("rank", "waited for", "layer", "count", "total"), waits, stacked=False)
        return timeline.to_svg(traces, first - 1, last - 1), tables

    def save(self, owner: str) -> str | None:
        """The trace as a file for chrome://tracing or Perfetto."""
        run = self.run_of(owner)
        if run is None or not timeline.traces_of(run):
            return None
        path = self._state.folder_of(owner) / "trace.json"
        run.save_trace(path)
        return str(path)


def totals(run: Run) -> list[tuple[str, ...]]:
    """Bytes and waiting time of each rank in the whole run."""
    return [
        (
            str(rank.rank),
            rank.device,
            readable_bytes(sum(rank.bytes_sent.values())),
            readable_bytes(sum(rank.bytes_received.values())),
            f"{sum(rank.seconds_waited.values()):.2f} s",
        )
        for rank in run.ranks
    ]


def build(state: AppState, owner: gr.State) -> tuple[TimelineTab, list[Any]]:
    """Build the tab. Returns it, and the outputs of `refresh`."""
    tab = TimelineTab(state)
    diagram = gr.HTML(html.notice(NOTHING), elem_id="timeline-diagram")
    with gr.Row():
        first = gr.Slider(1, 2, 1, step=1, label="From step", interactive=False)
        last = gr.Slider(1, 2, 1, step=1, label="To step", interactive=False)
        save = gr.DownloadButton("Trace for Perfetto", interactive=False, elem_id="timeline-save")
    tables = gr.HTML(elem_id="timeline-tables")
    changes = [first.input, last.input]
    gr.on(
        changes, tab.show, [owner, first, last], [diagram, tables], trigger_mode="always_last", show_progress="hidden"
    )
    return tab, [diagram, tables, first, last, save]
