"""Statistics of a call and plans as HTML, for notebooks.

A bar for each rank, with the part of the call that it waited; a column for each guidance branch and part of the
prompts, with a box for each band. Text is escaped, and there is no script and no address in it, so that a notebook
shows it without trust.
"""

from collections.abc import Sequence
from html import escape

from patchpar.pipeline.rank_stats import RankStats
from patchpar.plan.byte_sizes import readable_bytes
from patchpar.plan.mesh import Mesh
from patchpar.plan.plan import Plan

BAR_WIDTH = 240  # in pixels
COMPUTING, WAITING = "#4c78a8", "#e45756"
WIDTH, HEIGHT = 180, 160  # of an image, in pixels
COLORS = ("#cfe3f7", "#fbe3c4", "#dcd6f5", "#f6d3d9")
BRANCHES = ("negative prompt", "prompt")
Bands = dict[int, list[int]]
HEADS = ("rank", "device", "computing, waiting", "waited", "sent", "stale values held")


def html_of_run(title: str, seconds: float, ranks: Sequence[RankStats]) -> str:
    """Return a table of the ranks of a call that took `seconds`, under `title`."""
    head = "".join(f"<th>{name}</th>" for name in HEADS)
    body = "".join(_html_of(rank, seconds) for rank in ranks)
    return f"<p>{escape(title)}</p><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _html_of(rank: RankStats, seconds: float) -> str:
    waited, sent = sum(rank.seconds_waited.values()), readable_bytes(sum(rank.bytes_sent.values()))
    part = min(waited / seconds, 1.0) if seconds > 0 else 0.0
    held = readable_bytes(rank.stale_bytes) if rank.stale_bytes else ""
    cells = (str(rank.rank), escape(rank.device), _bar(part), f"{waited:.2f} s ({part:.0%})", sent, held)
    return f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"


def _bar(waiting: float) -> str:
    """Return a bar whose right part is the time spent waiting, 0 to 1."""
    right = round(BAR_WIDTH * waiting)
    parts = "".join(
        f'<span style="display:inline-block;height:0.9em;width:{width}px;background:{color}"></span>'
        for width, color in ((BAR_WIDTH - right, COMPUTING), (right, WAITING))
    )
    return f'<span role="img" aria-label="{waiting:.0%} waiting" style="white-space:nowrap">{parts}</span>'


def html_of_plan(title: str, plan: Plan | None, devices: Sequence[str]) -> str:
    """Return `title`, and which rank of `devices` has what under a plan; only the title where there is none yet."""
    head = f"<p>{escape(title)}</p>"
    if plan is None:
        return head
    columns = "".join(_column(plan, *key, bands, devices) for key, bands in _ranks_of(plan).items())
    return f'{head}<div style="display:flex;gap:12px">{columns}</div>'


def _ranks_of(plan: Plan) -> dict[tuple[int, int], Bands]:
    """Ranks of each band, by part of the prompts and guidance branch."""
    found: dict[tuple[int, int], Bands] = {}
    for rank in range(plan.world_size):
        mesh = Mesh(rank, range(plan.world_size), **plan.degrees())
        bands = found.setdefault((mesh["data"].rank, mesh["cfg"].rank), {})
        bands.setdefault(mesh["patch"].rank, []).append(rank)
    return found


def _column(plan: Plan, group: int, branch: int, bands: Bands, devices: Sequence[str]) -> str:
    names = [f"prompts {group + 1} of {plan.data}"] if plan.data > 1 else []
    names += [BRANCHES[branch]] if plan.cfg > 1 else []
    parts = plan.ratio if plan.ratio and not isinstance(plan.ratio, str) else (1,) * plan.patch
    boxes = "".join(
        _box(COLORS[band % len(COLORS)], round(HEIGHT * parts[band] / sum(parts)), _names_of(ranks, devices))
        for band, ranks in bands.items()
    )
    return f"<div><div>{escape(', '.join(names) or 'the image')}</div>{boxes}</div>"


def _names_of(ranks: Sequence[int], devices: Sequence[str]) -> str:
    return ", ".join(f"rank {rank} on {devices[rank]}" if rank < len(devices) else f"rank {rank}" for rank in ranks)


def _box(color: str, height: int, text: str) -> str:
    style = f"width:{WIDTH}px;height:{height}px;background:{color};color:#1f2933;border:1px solid #ffffff;overflow:auto"
    return f'<div style="{style}">{escape(text)}</div>'
