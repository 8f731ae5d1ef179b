"""The tab Timeline: what each rank did in the page's last run."""

from typing import Any

import gradio as gr

from patchpar import Run
from patchpar.pipeline.report import readable_bytes

from . import timeline, words
from .answers import answered
from .studio import AppState

NOTHING = "Draw a picture first, with “Record a timeline” on: its exchanges are shown here."


def failed(sentence: str) -> tuple[Any, ...]:
    """What `show` fills, where something went wrong."""
    return words.failure(sentence), gr.skip()


class TimelineTab:
    """What the tab does."""

    def __init__(self, studio: AppState) -> None:
        self._studio = studio

    def run_of(self, owner: str) -> Run | None:
        """The page's last run."""
        found: Run | None = self._studio.desk.kept(owner, "run")
        return found

    @answered(lambda sentence: (*failed(sentence), gr.skip(), gr.skip(), gr.skip()))
    def refresh(self, owner: str) -> tuple[Any, ...]:
        """Everything, for the whole run; and the sliders at its ends."""
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

    @answered(failed)
    def show(self, owner: str, first: int, last: int) -> tuple[str, str]:
        """(drawing, tables) of steps `first` to `last`, counted from one."""
        run = self.run_of(owner)
        traces = timeline.traces_of(run)
        if run is None or not traces:
            return words.notice(NOTHING), ""
        first, last = min(first, last), max(first, last)
        window = timeline.window_of(traces, first - 1, last - 1)
        waits = timeline.longest_waits(traces, window)
        tables = words.table(("rank", "device", "sent", "received", "waited"), totals(run), stacked=False)
        if waits:
            tables += words.table(("rank", "waited for", "at", "times", "in all"), waits, stacked=False)
        return timeline.draw(traces, first - 1, last - 1), tables

    def save(self, owner: str) -> str | None:
        """The trace as a file for chrome://tracing or Perfetto."""
        run = self.run_of(owner)
        if run is None or not timeline.traces_of(run):
            return None
        path = self._studio.folder_of(owner) / "trace.json"
        run.save_trace(path)
        return str(path)


def totals(run: Run) -> list[tuple[str, ...]]:
    """What each rank exchanged in the whole run."""
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


def build(studio: AppState, owner: gr.State) -> tuple[TimelineTab, list[Any]]:
    """Lay the tab out. Returns it, and what `refresh` fills."""
    tab = TimelineTab(studio)
    drawing = gr.HTML(words.notice(NOTHING), elem_id="timeline-drawing")
    with gr.Row():
        first = gr.Slider(1, 2, 1, step=1, label="From step", interactive=False)
        last = gr.Slider(1, 2, 1, step=1, label="To step", interactive=False)
        save = gr.DownloadButton("Trace for Perfetto", interactive=False, elem_id="timeline-save")
    tables = gr.HTML(elem_id="timeline-tables")
    changes = [first.input, last.input]
    gr.on(
        changes, tab.show, [owner, first, last], [drawing, tables], trigger_mode="always_last", show_progress="hidden"
    )
    return tab, [drawing, tables, first, last, save]
