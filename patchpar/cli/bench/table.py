"""The table of `patchpar bench`: one row per plan and setting, means over the prompts, as Markdown."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from patchpar.cli.bench.records import BenchRecord, BenchSetting

HEADS = (
    *("plan", "prompts", "PSNR, dB", "worst", "SSIM", "LPIPS"),
    *("sent, MB", "seconds", "speed-up", "waited", "exact steps"),
)
EQUAL_DB = 150.0
"""Stands for the infinite PSNR of equal images in a mean."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchRow:
    """Means over the prompts of a plan. `psnr_db` counts equal images as 150 dB; `worst_db`: of the worst prompt.

    `bytes_per_step`: of the rank that sends most; seconds are of a call; `waited`: of the rank that waits most, in a
    call; `exact_steps`: None if the plan never uses stale values.
    """

    setting: BenchSetting
    plan: str
    prompts: int
    psnr_db: float
    worst_db: float
    ssim: float
    lpips: float | None
    bytes_per_step: float
    seconds: float
    single_seconds: float
    waited: float
    exact_steps: float | None

    @classmethod
    def of(cls, records: Sequence[BenchRecord]) -> BenchRow:
        """Return the row of a plan's records in one setting."""
        psnr = [min(each.psnr_db, EQUAL_DB) for each in records]
        lpips = [each.lpips for each in records if each.lpips is not None]
        exact = [each.exact_steps for each in records if each.exact_steps is not None]
        return cls(
            setting=records[0].key.setting,
            plan=records[0].key.plan,
            prompts=len(records),
            psnr_db=_mean(psnr),
            worst_db=min(psnr),
            ssim=_mean(each.ssim for each in records),
            lpips=_mean(lpips) if len(lpips) == len(records) else None,
            bytes_per_step=_mean(each.bytes_per_step for each in records),
            seconds=_mean(each.seconds for each in records),
            single_seconds=_mean(each.single_seconds for each in records),
            waited=_mean(each.waited for each in records),
            exact_steps=_mean(exact) if exact else None,
        )

    @property
    def speedup(self) -> float:
        """Seconds of one process by those of the plan."""
        return self.single_seconds / self.seconds


def rows_of(records: Iterable[BenchRecord]) -> list[BenchRow]:
    """Return a row for each plan and setting, the best PSNR of a setting first."""
    groups = dict[tuple[BenchSetting, str], list[BenchRecord]]()
    for record in records:
        groups.setdefault((record.key.setting, record.key.plan), []).append(record)
    rows = [BenchRow.of(group) for group in groups.values()]
    settings = list(dict.fromkeys(row.setting for row in rows))
    return sorted(rows, key=lambda row: (settings.index(row.setting), -row.psnr_db, row.bytes_per_step))


def markdown(rows: Sequence[BenchRow], refused: Mapping[str, str], devices: str) -> str:
    """Return the document: what was measured, a table per setting, and the plans that were refused."""
    return "\n".join([*_lines(rows, refused, devices), ""])


def _lines(rows: Sequence[BenchRow], refused: Mapping[str, str], devices: str) -> Iterator[str]:
    yield "# Plans beside one process"
    yield ""
    yield f"Measured by `patchpar bench` on {devices}. Means over the prompts; `worst`: the prompt with the least PSNR."
    yield "Images are compared before rounding to 8 bits. `sent`: MB (10^6 bytes) per step by the rank that sends most,"
    yield "without the VAE. `waited`: seconds of a call, by the rank that waits most. `speed-up`: over one process."
    for setting in dict.fromkeys(row.setting for row in rows):
        of_setting = [row for row in rows if row.setting == setting]
        yield from ("", f"## {setting.title}", "")
        yield from (f"Model {setting.model} in {setting.dtype}, {setting.libraries}.", "")
        yield f"| {' | '.join(HEADS)} |"
        yield "|---" * len(HEADS) + "|"
        yield from map(_row, of_setting)
    if refused:
        yield from ("", "## Refused", "", *(f"- `{plan}`: {why}" for plan, why in refused.items()))


def _row(row: BenchRow) -> str:
    lpips = "" if row.lpips is None else f"{row.lpips:.4f}"
    exact = "all" if row.exact_steps is None else f"{row.exact_steps:.3g}"
    cells = (
        row.plan,
        str(row.prompts),
        decibels(row.psnr_db),
        decibels(row.worst_db),
        f"{row.ssim:.4f}",
        lpips,
        f"{row.bytes_per_step / 1e6:.3f}",
        f"{row.seconds:.2f}",
        f"{row.speedup:.2f}",
        f"{row.waited:.2f}",
        exact,
    )
    return f"| {' | '.join(cells)} |"


def decibels(value: float) -> str:
    """Return a PSNR as text."""
    return "equal" if value >= EQUAL_DB else f"{value:.1f}"


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return math.fsum(found) / len(found)
