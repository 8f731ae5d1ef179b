"""What `benchmarks.quality` measured as a table in Markdown, one row per method and number of ranks."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.image_quality import MAX_DB
from benchmarks.page import write_page
from benchmarks.quality.records import ONE_PROCESS, Method, Record, Setting

CONTROLS = {"off": "negative control: no exchange", "frozen": "negative control: exchange frozen"}
PUBLISHED = {"displaced:preset=paper": "DistriFusion"}
"""Methods that compute what the code of a paper does, as their labels begin, and what it calls them."""
INTRO = f"""# Quality against bytes

Real ranks against plain diffusers in one process: the embedded model in fp32 on CPUs, held-out captions, same seeds.
Images are compared before rounding to 8 bits; all latents are decoded by one process. Means over the captions;
`worst` is the caption with the least PSNR. Equal images are booked with {MAX_DB:g} dB. `captions right`: a
classifier sees on both sides what the caption says. `sent`: MB (10⁶ bytes) in a step, both guidance branches, fp32, for
one image, by the rank that sends most: the mean of all steps, warm-up included, and of the `stale` ones alone, which
use values of the step before. `waited`: by the rank that waits most, in a step of a whole batch; a star where there
were more ranks than cores, so that most of it is waiting for a core. A row stays until it is measured again with as
many captions, so that rows may be of different versions and machines: compare `waited` only in one setting. A line of
the records names the versions of torch, diffusers and patchpar that its image was made with; older lines name none.
Measured by `python -m benchmarks.quality`, written by `python -m benchmarks.quality --table`.
"""
EARLIER = """The model has been trained further since: its weights are those of `{model}`. Sections of other models were
measured with its earlier weights; compare methods within one model.
"""
HEAD = (
    "| method | ranks | captions | PSNR, dB | worst | SSIM | LPIPS | captions right "
    "| exact steps | sent, MB | stale | waited, ms |",
    "|" + "---|" * 12,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One method in one setting: means over the captions. `lpips`: None unless measured for all of them.

    `first`: the place of its first caption in the list, so that a row can go on where another ends.
    """

    setting: Setting
    method: Method
    label: str
    ranks: int
    captions: int
    psnr_db: float
    worst_db: float
    ssim: float
    lpips: float | None
    right: float
    exact_steps: float
    bytes_per_step: float
    stale_step_bytes: float | None
    seconds_waited: float
    crowded: bool
    first: int = 0

    @property
    def published_as(self) -> str | None:
        """What the paper calls this method whose code computes the same; None for methods of ours."""
        return next((name for label, name in PUBLISHED.items() if self.label.startswith(label)), None)

    def __str__(self) -> str:
        one = self.method == ONE_PROCESS
        note = CONTROLS.get(self.method.exchange) or self.published_as
        lpips = "not measured" if self.lpips is None else f"{self.lpips:.4f}"
        stale = "" if self.stale_step_bytes is None else f"{self.stale_step_bytes / 1e6:.3f}"
        cells = [
            f"{self.label} ({note})" if note else self.label,
            self.ranks,
            self.captions,
            "" if one else f"{self.psnr_db:.1f}",
            "" if one else f"{self.worst_db:.1f}",
            "" if one else f"{self.ssim:.4f}",
            "" if one else lpips,
            f"{100 * self.right:.0f} %",
            "0" if self.method.exchange == "off" else f"{self.exact_steps:.3g}",
            "" if one else f"{self.bytes_per_step / 1e6:.3f}",
            stale,
            "" if one else f"{1e3 * self.seconds_waited:.0f}{'*' * self.crowded}",
        ]
        return f"| {' | '.join(map(str, cells))} |"


def rows_of(records: Iterable[Record]) -> list[Row]:
    """A row for every method in a setting on so many ranks."""
    cells: dict[tuple[Setting, Method, int], list[Record]] = defaultdict(list)
    for record in records:
        cells[record.setting, record.method, record.ranks].append(record)
    return in_order(map(_row, cells.values()))


def _position(setting: Setting) -> tuple[object, ...]:
    """Where a setting stands in the document."""
    pixels = setting.height * setting.width
    return pixels, setting.height, setting.scheduler, setting.steps, setting.guidance, setting.seed, setting.model


def _row(records: Sequence[Record]) -> Row:
    last = records[-1]
    return Row(
        setting=last.setting,
        method=last.method,
        label=last.label,
        ranks=last.ranks,
        captions=len(records),
        psnr_db=statistics.fmean(record.psnr_db for record in records),
        worst_db=min(record.psnr_db for record in records),
        ssim=statistics.fmean(record.ssim for record in records),
        lpips=_mean_if_all([record.lpips for record in records]),
        right=statistics.fmean(record.right for record in records),
        exact_steps=statistics.fmean(record.exact_steps for record in records),
        bytes_per_step=statistics.fmean(record.bytes_per_step for record in records),
        stale_step_bytes=_mean_if_all([record.stale_step_bytes for record in records]),
        seconds_waited=statistics.fmean(record.seconds_waited for record in records),
        crowded=any(record.ranks > record.cores for record in records),
        first=min(record.caption for record in records),
    )


def _mean_if_all(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if len(known) == len(values) else None


def in_order(rows: Iterable[Row]) -> list[Row]:
    """Rows, by setting, ranks, and the best first."""
    return sorted(rows, key=lambda row: (_position(row.setting), row.ranks, -row.psnr_db, row.label))


def table(rows: Iterable[Row], model: str | None = None) -> str:
    """The whole document, of rows in order, and which of them have earlier weights than `model`.

    Raises ValueError if there is nothing to say, of `model` where it is given.
    """
    rows = list(rows)
    earlier = {row.setting.model for row in rows if model and row.setting.model != model}
    if not rows or (model and not any(row.setting.model == model for row in rows)):
        raise ValueError("no image of this selection has been measured: leave flags out, or measure first")
    lines = [INTRO, *([EARLIER.format(model=model)] if earlier else [])]
    for setting in dict.fromkeys(row.setting for row in rows):
        same = [str(row) for row in rows if row.setting == setting]
        details = f"Guidance {setting.guidance:g}, seeds from {setting.seed}, model `{setting.model}`."
        lines += [f"## {setting}", "", details, "", *HEAD, *same, ""]
    return "\n".join(lines)


def write_table(path: Path, rows: Iterable[Row], model: str | None = None) -> None:
    """Write the document. Raises ValueError if there is nothing to say."""
    write_page(table(rows, model), path)
