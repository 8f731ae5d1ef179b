"""Recorded ranks kept in files: a plan is recorded once for a model's configuration, a call, and versions.

Read without torch. A file holds the programs of the ranks that were recorded, or why the plan was refused.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import patchpar
from patchpar.errors import PlanError, UnsupportedModel
from patchpar.pipeline.planner.image_ranks import ImageRanks, SourcesOfRank, ranks_from
from patchpar.pipeline.planner.recorded_rank import RecordedRank
from patchpar.plan.dataclass_json import decoded
from patchpar.plan.plan import Plan
from patchpar.plan.replay.tape_json import from_text, to_text
from patchpar.shard.verification_cache import VerificationCache, version_of

FOLDER = "tapes"
RANKS, CALL = "ranks", "call"
READ = ("json", "txt", "model", "jinja", "py")
"""Kinds of a model's files that change what is recorded."""
Found = ImageRanks | PlanError
T = TypeVar("T")
NO_FACTS: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class CallFacts:
    """What the planner knows of a call: the number of its guidance branches, and of the steps of its scheduler."""

    branches: int
    steps: int


@dataclass(frozen=True, slots=True)
class KeptTapes:
    """Tapes of one model and call, kept in `files` under these `facts`; None: nothing is kept.

    `is_fresh`: nothing is found that was kept before, and what is found anew is kept.
    """

    files: VerificationCache | None
    facts: Mapping[str, Any]
    is_fresh: bool = False

    @classmethod
    def of(
        cls,
        folder: Path,
        options: Mapping[str, Any],
        kwargs: Mapping[str, Any],
        *,
        facts: Mapping[str, Any] = NO_FACTS,
        files: VerificationCache | None = None,
        fresh: bool = False,
    ) -> "KeptTapes":
        """Return those of a model folder, loaded with `options` and called with `kwargs`, in `files` or the user's.

        `facts`: what else they depend on. `fresh`: nothing is found there. A call whose arguments are no texts and
        numbers is not kept: its tape may depend on what they hold.
        """
        of_call = {
            "model": model_digest(folder),
            "options": dict(options),
            "call": dict(kwargs),
            "source": _source(),
            "transformers": version_of("transformers"),  # of encoders
        }
        try:
            json.dumps([dict(options), dict(kwargs)])
        except TypeError:
            return cls(None, of_call)
        facts = {**of_call, **facts}
        kept = files or VerificationCache.in_home(FOLDER)
        return cls(kept, facts, fresh)

    def with_facts(self, **facts: Any) -> "KeptTapes":
        """Return the same for what depends on more facts."""
        return replace(self, facts={**self.facts, **facts})

    def call(self) -> CallFacts | None:
        """Return what is known of the call; None if nothing is kept."""
        return self.find_entry(CALL, lambda found: decoded(CallFacts, found))

    def keep_call(self, call: CallFacts) -> None:
        """Keep what is known of the call."""
        self.keep_entry(CALL, asdict(call))

    def find(self, plan: Plan) -> Found | None:
        """Return the ranks of an image under a plan, or why it was refused; None if they are not kept."""
        return self.find_entry(RANKS, lambda found: _read(plan, found), {"plan": str(plan)})

    def keep(self, plan: Plan, found: Found) -> None:
        """Keep the ranks of an image under a plan, or why it was refused."""
        self.keep_entry(RANKS, _written(found), {"plan": str(plan)})

    def find_entry(self, what: str, read: Callable[[Any], T], more: Mapping[str, Any] = NO_FACTS) -> T | None:
        """Return the entry `what` that is kept under the facts and these, as `read` returns it; None without one."""
        if self.files is None or self.is_fresh:
            return None
        return self.files.find(self._key(more), what, read)

    def keep_entry(self, what: str, found: Any, more: Mapping[str, Any] = NO_FACTS) -> None:
        """Keep an entry under the facts and these."""
        if self.files is not None:
            self.files.remember(self._key(more), more or self.facts, **{what: found})

    def _key(self, more: Mapping[str, Any]) -> str:
        assert self.files is not None
        return self.files.key({**self.facts, **more})


def model_digest(folder: Path) -> str:
    """Return a digest of a model's configuration, tokenizers and code.

    Weights are not read: they do not change what is recorded.
    """
    found = hashlib.sha256()
    for file in sorted(each for kind in READ for each in (*folder.glob(f"*.{kind}"), *folder.glob(f"*/*.{kind}"))):
        if not file.name.endswith(".safetensors.index.json"):
            found.update(str(file.relative_to(folder)).encode())
            found.update(hashlib.sha256(file.read_bytes()).digest())
    return found.hexdigest()


def _source() -> list[int]:
    """Return what changes with the code of this package, also between two versions: a tape is what its code does."""
    stats = [file.stat() for file in _sources(str(Path(patchpar.__file__).parent))]
    return [len(stats), sum(each.st_size for each in stats), max(each.st_mtime_ns for each in stats)]


def _sources(folder: str) -> Iterator[os.DirEntry[str]]:
    """Yield the files of Python in a folder and those in it; several times as fast as `Path.rglob`."""
    for entry in os.scandir(folder):
        if entry.name.endswith(".py"):
            yield entry
        elif entry.name != "__pycache__" and entry.is_dir(follow_symlinks=False):
            yield from _sources(entry.path)


def _written(found: Found) -> dict[str, Any]:
    if isinstance(found, PlanError):
        return {"refused": str(found), "unsupported": isinstance(found, UnsupportedModel)}
    recorded = [{**asdict(replace(rank, tape=())), "tape": to_text(rank.tape)} for rank in found.recorded.values()]
    return {"recorded": recorded, "sources": [(each.steps, each.decode) for each in found.sources]}


def _read(plan: Plan, found: Mapping[str, Any]) -> Found:
    if "refused" in found:
        return (UnsupportedModel if found["unsupported"] else PlanError)(found["refused"])
    recorded = {each["rank"]: RecordedRank(**{**each, "tape": from_text(each["tape"])}) for each in found["recorded"]}
    return ranks_from(plan, recorded, [SourcesOfRank(*each) for each in found["sources"]])
