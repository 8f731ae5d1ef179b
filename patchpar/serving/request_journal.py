"""Requests that a server has accepted and not finished, in a folder, for the next one; `finished_results` has others.

FOLDER/ID/request.json          the request, its seed, its owner, and figures of finished images
FOLDER/ID/image-0.png ...       finished images, without loss
FOLDER/ID/upload-0.png ...      images that came with it, and mask.png
FOLDER/ID/call.safetensors      the denoiser calls of the image that is not finished

A folder appears at once, when all of it is written. Nothing in it is code.
"""

import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

from patchpar.errors import PlanError
from patchpar.media.image_file import read_image_file
from patchpar.pipeline.suspended_call import SuspendedCall
from patchpar.plan.json_files import read_object
from patchpar.serving.folder_lock import FolderLock
from patchpar.serving.partial_images import CompletedImage, ImageFigures
from patchpar.serving.unfinished_call import UnfinishedCall
from patchpar.serving.uploaded_image import MAX_PIXELS, UploadedImage, Uploads

FORMAT = 1
NAME = re.compile(r"(job|video)_[0-9a-f]{24}")
PART, OLD = ".part", ".old"
"""Ends of the names of folders that are being written, and of those that they replace."""
REQUEST, CALL, MASK = "request.json", "call.safetensors", "mask.png"
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalEntry:
    """What the journal has of any request. `route`: "generation", "edit" or "video". `request`: its fields, for JSON.

    `id`: the name of its folder. `model`: that was served. `key` and `digest`: of its Idempotency-Key. `created_at`:
    Unix time in seconds.
    """

    id: str
    model: str
    route: str
    request: dict[str, Any]
    seed: int
    owner: str
    created_at: int
    key: str = ""
    digest: str = ""

    @property
    def facts(self) -> dict[str, Any]:
        """These fields, for JSON."""
        return {"format": FORMAT, **{each.name: getattr(self, each.name) for each in fields(JournalEntry)}}


@dataclass(frozen=True, slots=True, kw_only=True)
class JournaledRequest(JournalEntry):
    """A request that has not ended."""

    uploads: Uploads = field(default_factory=Uploads)
    kept: UnfinishedCall = field(default_factory=UnfinishedCall)


Written = TypeVar("Written", bound=JournalEntry)


class RequestJournal:
    """A folder of requests, which no other server uses until `close`. Raises PlanError if one does, or there is none.

    Two servers that took up the same requests would both make them.
    """

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():
            raise PlanError(f"--journal {folder}: there is no such folder; make it first")
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PlanError(f"--journal {folder}: it cannot be written to: change its permissions, or use another one")
        self._folder = folder
        self._lock = FolderLock(folder, "--journal")
        self._recover()

    def _recover(self) -> None:
        """Clear up what a server has left that was killed while it wrote: each request is as it was, or as it is."""
        for path in self._folder.glob(f".*{OLD}"):
            target = self._folder / path.name[1 : -len(OLD)]
            if target.exists():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.replace(target)
        for path in self._folder.glob(f".*{PART}"):
            shutil.rmtree(path, ignore_errors=True)

    def close(self) -> None:
        """Let another server use the folder. Idempotent."""
        self._lock.close()

    @property
    def is_empty(self) -> bool:
        """Whether there is neither a request nor a result."""
        return not self._folders()

    def _folders(self) -> list[Path]:
        """Return the folders of requests and results, in the order of their names."""
        return sorted(path for path in self._folder.iterdir() if NAME.fullmatch(path.name) and path.is_dir())

    @contextmanager
    def writing(self, name: str) -> Iterator[Path]:
        """Give a folder to write into, which stands under `name` afterwards, instead of what was there.

        What was there stays until the new one stands, and stays if it cannot be written.
        """
        target, part, old = (self._folder / each for each in (name, f".{name}{PART}", f".{name}{OLD}"))
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(mode=0o700)
        try:
            yield part
        except BaseException:
            shutil.rmtree(part, ignore_errors=True)  # else it would take the room that others need
            raise
        if target.exists():
            target.replace(old)
        part.replace(target)
        shutil.rmtree(old, ignore_errors=True)

    def holds(self, name: str) -> bool:
        """Whether there is a request of this ID."""
        return (self._folder / name / REQUEST).exists()

    def read(self, file: str, read: Callable[[Path], Written], served: str) -> list[Written]:
        """Return what `read` makes of each folder with such a file, in the order of their names.

        What cannot be read stays where it is, and the log says why. Raises PlanError for another model than `served`.
        """
        found = []
        for path in (each for each in self._folders() if (each / file).exists()):
            try:
                found.append(read(path))
            except (PlanError, OSError, KeyError, TypeError, ValueError) as error:
                log.warning("%s cannot be taken up: %s", path, error)
        for each in found:
            if each.model != served:
                raise PlanError(
                    f"--journal {self._folder}: {each.id} is for the model {each.model}, and this is {served}: "
                    "use another folder, or serve that one first"
                )
        return found

    def save(self, entry: JournaledRequest) -> None:
        """Write a request, instead of what was there of it. Raises OSError."""
        with self.writing(entry.id) as part:
            for number, image in enumerate(entry.uploads.images):
                image.decoded().save(part / f"upload-{number}.png")
            if entry.uploads.mask is not None:
                entry.uploads.mask.decoded().save(part / MASK)
            for number, done in enumerate(entry.kept.done):
                done.image.save(part / f"image-{number}.png")
            if entry.kept.suspended is not None:
                entry.kept.suspended.save(part / CALL)
            (part / REQUEST).write_text(json.dumps(_as_json(entry)), encoding="utf-8")

    def entries(self, model: str) -> Iterator[JournaledRequest]:
        """Yield the requests, the oldest first. What cannot be read stays where it is, and the log says why.

        Raises PlanError for a request of another model than `model`.
        """
        yield from sorted(self.read(REQUEST, _read, model), key=lambda entry: (entry.created_at, entry.id))

    def remove(self, name: str) -> None:
        """Delete a request that has ended. Idempotent."""
        if NAME.fullmatch(name):
            shutil.rmtree(self._folder / name, ignore_errors=True)


def _as_json(entry: JournaledRequest) -> dict[str, Any]:
    done = [
        {"figures": asdict(each.figures), "reason": each.reason, "prompt_tokens": each.prompt_tokens}
        for each in entry.kept.done
    ]
    return {
        **entry.facts,
        "done": done,
        "partial": list(entry.kept.partial),
        "uploads": len(entry.uploads.images),
        "has_mask": entry.uploads.mask is not None,
        "is_suspended": entry.kept.suspended is not None,
    }


def read_entry(file: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return all that a file has, and its fields of a JournalEntry.

    Raises PlanError, OSError, KeyError, TypeError and ValueError.
    """
    facts = read_object(file)
    if facts["format"] != FORMAT or facts["id"] != file.parent.name:
        raise ValueError(f"it has format {facts['format']!r} and is {facts['id']!r}")
    bytes.fromhex(facts["digest"])
    texts = {name: str(facts[name]) for name in ("id", "model", "route", "owner", "key", "digest")}
    numbers = {name: int(facts[name]) for name in ("seed", "created_at")}
    return facts, {**texts, **numbers, "request": dict(facts["request"])}


def _read(path: Path) -> JournaledRequest:
    """Return the request of a folder. Raises PlanError, OSError, KeyError, TypeError and ValueError."""
    facts, entry = read_entry(path / REQUEST)
    kept = UnfinishedCall(
        tuple(_done(path, number, each) for number, each in enumerate(facts["done"])),
        SuspendedCall.load(path / CALL) if facts["is_suspended"] else None,
    )
    step, sent = facts["partial"]
    kept.partial = int(step), int(sent)
    uploads = _uploads(path, int(facts["uploads"]), bool(facts["has_mask"]))
    return JournaledRequest(**entry, uploads=uploads, kept=kept)


def _done(path: Path, number: int, facts: Any) -> CompletedImage:
    return CompletedImage(
        image_index=number,
        image=_image(path / f"image-{number}.png"),
        figures=ImageFigures.from_facts(facts["figures"]),
        reason=str(facts["reason"]),
        prompt_tokens=int(facts["prompt_tokens"]),
    )


def _uploads(path: Path, count: int, has_mask: bool) -> Uploads:
    images = tuple(_upload(path / f"upload-{number}.png") for number in range(count))
    return Uploads(images=images, mask=_upload(path / MASK, is_mask=True) if has_mask else None)


def _upload(path: Path, *, is_mask: bool = False) -> UploadedImage:
    return UploadedImage(data=path.read_bytes(), size=_image(path).size, is_mask=is_mask)


def _image(path: Path) -> Any:
    with path.open("rb") as file:
        return read_image_file(file, path.name, most_pixels=MAX_PIXELS, formats=("PNG",))
