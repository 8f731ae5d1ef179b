"""What was found of one denoiser, and the row of the table that says so."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass

from .modes import modes
from .own_lines import lines_naming
from .subjects import Subject
from .trial import Found, Result, Trial

RANKS = (2, 3, 4)
NOTHING = "-"


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The first use of a denoiser, then every mode on every number of ranks.

    `gathered`: at how many attention calls keys come all at once in every mode. `own_lines`: where the package knows
    the class by name. `tokens_of`: the argument whose tokens are split, where that is not the one that is denoised.
    """

    name: str
    family: str
    found: Found
    results: tuple[Result, ...]
    restored: bool
    gathered: int
    own_lines: tuple[str, ...]
    tokens_of: str = ""

    @property
    def failures(self) -> list[str]:
        """Everything that is not as it should be."""
        reported = [self.found.failure] if self.found.failure else []
        reported += [] if self.restored else ["the model is not as it was before"]
        return reported + [
            f"{each.mode.name} on {each.ranks} ranks: {each.failure}" for each in self.results if each.failure
        ]

    @property
    def split(self) -> str:
        """How it is split, or that it is not."""
        if self.failures:
            return "failed"
        if self.found.refusal:
            return "refused"
        if not self.found.by_tokens:
            return "bands"
        return "tokens, partly" if self.found.whole else "tokens"


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the table. Errors are the powers of ten that they stay below, since rounding differs by machine."""

    name: str
    family: str
    split: str
    modes: str
    two_ranks: str
    three_ranks: str
    four_ranks: str
    without: str
    note: str

    def cells(self) -> tuple[str, ...]:
        """In the order of the table."""
        return astuple(self)


def examine(subject: Subject, ranks: Sequence[int]) -> Report:
    """Try everything."""
    trial = Trial(subject, max(RANKS))
    found, results = trial.first_use(), []
    for count in ranks if found.known is not None else ():
        for mode in modes(count):
            results.append(trial.run(mode, count, found.known))
    split_latent = found.known.latent if found.by_tokens else subject.latent
    return Report(
        name=subject.name,
        family=subject.family,
        found=found,
        results=tuple(results),
        restored=trial.is_restored(),
        gathered=len(trial.gathered),
        own_lines=tuple(lines_naming([subject.name])[subject.name]),
        tokens_of="" if split_latent == subject.latent else split_latent,
    )


def row_of(report: Report) -> Row:
    """The line of the table that says what was found."""
    tried = [each for each in report.results if each.mode.exchange == "on"]
    right = [each for each in tried if not each.refusal and not each.failure]
    controls = [each.best for each in report.results if each.mode.exchange == "off" and each.best is not None]
    return Row(
        report.name,
        report.family,
        report.split,
        f"{len(right)} of {len(tried)}" if tried else NOTHING,
        *(_worst([each.worst for each in tried if each.ranks == count]) for count in RANKS),
        f"{min(controls):.1g}" if controls else NOTHING,
        "; ".join(_notes(report)).replace("|", "\\|").replace("\n", " "),
    )


def _worst(errors: Sequence[float | None]) -> str:
    known = [error for error in errors if error is not None]
    if not known:
        return NOTHING
    error = max(known)
    if error == 0 or math.isinf(error):
        return "equal" if error == 0 else "not finite"
    return f"1e{math.floor(math.log10(error)) + 1}"


def _notes(report: Report) -> list[str]:
    reported = report.failures
    reported += _reasons(report.found.refusal)
    reported += [f"every rank has all of {left}" for left in _by_reason(report.found.whole)]
    reported += _replicated(report.found)
    reported += _refused_modes(report.results)
    if report.tokens_of:
        reported.append(f"the tokens split are those of {report.tokens_of}")
    if report.gathered:
        reported.append(f"keys of {report.gathered} attention calls come all at once in every mode")
    if report.own_lines:
        reported.append(f"known by name: {', '.join(report.own_lines)}")
    return reported


def _replicated(found: Found) -> list[str]:
    blocks = found.known.blocks if found.by_tokens else ()
    parts = {block.kind: [part.path for part in block.replicated] for block in blocks if block.replicated}
    return [f"every rank computes {', '.join(paths)} of {kind} with all tokens" for kind, paths in parts.items()]


def _refused_modes(results: Sequence[Result]) -> list[str]:
    """Each reason once, with the modes it is for."""
    reasons: dict[str, list[str]] = {}
    for each in results:
        if each.refusal:
            heads = re.search(r"(\d+) attention heads cannot be shared", each.refusal)
            reason = f"it has {heads[1]} heads" if heads else each.refusal
            reasons.setdefault(reason, []).append(f"{each.mode.name} on {each.ranks} ranks")
    return [f"no {', '.join(names)}: {reason}" for reason, names in reasons.items()]


def _reasons(refusal: str) -> list[str]:
    """Why it is not split; where that is told block by block, each reason once with the blocks it is for."""
    blocks = re.search(r"cannot be split by tokens \((.*)\): use plan ", refusal, re.DOTALL)
    if blocks is None:
        return [refusal.splitlines()[0]] if refusal else []
    reported = re.split(r"; (?=[\w.]+, \d+ x )", blocks[1])
    if not all(": " in each for each in reported):
        return [blocks[1]]
    return _by_reason(dict(each.split(": ", 1) for each in reported))


def _by_reason(blocks: Mapping[str, str]) -> list[str]:
    """Classes of blocks, each "path, number x class", by the reason that they have in common."""
    found: dict[str, dict[str, None]] = {}
    for block, reason in blocks.items():
        found.setdefault(reason, {})[block.rpartition(" x ")[2]] = None
    return [f"{', '.join(names)}: {reason}" for reason, names in found.items()]
