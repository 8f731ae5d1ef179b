"""Requests that a server has accepted and not finished, in a folder, for the next one.

FOLDER/ID/request.json          the request, its seed, its owner, and figures of finished images
FOLDER/ID/image-0.png ...       finished images, without loss
FOLDER/ID/upload-0.png ...      images that came with it, and mask.png
FOLDER/ID/call.safetensors      the denoiser calls of the image that is not finished

A folder appears at once, when all of it is written. Nothing in it is code.
"""

import json
import logging
import re
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from patchpar.errors import PlanError
from patchpar.models.image_file import read_image_file
from patchpar.pipeline.suspended_call import SuspendedCall
from patchpar.plan.json_files import read_object
from patchpar.serving.partial_images import CompletedImage, ImageFigures
from patchpar.serving.unfinished_call import UnfinishedCall
from patchpar.serving.uploaded_image import MAX_PIXELS, Uploads

FORMAT = 1
NAME = re.compile(r"(job|video)_[0-9a-f]{24}")
REQUEST, CALL, MASK = "request.json", "call.safetensors", "mask.png"
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class JournaledRequest:
    """A request. `route`: "generation", "edit" or "video". `request`: its fields, for JSON.

    `key` and `digest`: of its Idempotency-Key. `created_at`: Unix time in seconds.
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
    uploads: Uploads = field(default_factory=Uploads)
    kept: UnfinishedCall = field(default_factory=UnfinishedCall)


class RequestJournal:
    """A folder of requests. Raises PlanError if there is none."""

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():
            raise PlanError(f"--journal {folder}: there is no such folder; make it first")
        self._folder = folder

    def save(self, entry: JournaledRequest) -> None:
        """Write a request, instead of what was there of it. Raises OSError."""
        target, part = self._folder / entry.id, self._folder / f".{entry.id}.part"
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(mode=0o700)
        for number, image in enumerate(entry.uploads.images):
            image.save(part / f"upload-{number}.png")
        if entry.uploads.mask is not None:
            entry.uploads.mask.save(part / MASK)
        for number, done in enumerate(entry.kept.done):
            done.image.save(part / f"image-{number}.png")
        if entry.kept.suspended is not None:
            entry.kept.suspended.save(part / CALL)
        (part / REQUEST).write_text(json.dumps(_as_json(entry)), encoding="utf-8")
        shutil.rmtree(target, ignore_errors=True)
        part.replace(target)

    def entries(self, model: str) -> Iterator[JournaledRequest]:
        """Yield the requests, the oldest first. What cannot be read stays where it is, and the log says why.

        Raises PlanError for a request of another model than `model`.
        """
        found = []
        for path in sorted(self._folder.iterdir()):
            if NAME.fullmatch(path.name) and path.is_dir():
                try:
                    found.append(_read(path))
                except (PlanError, OSError, KeyError, TypeError, ValueError) as error:
                    log.warning("%s cannot be taken up: %s", path, error)
        for entry in found:
            if entry.model != model:
                raise PlanError(
                    f"--journal {self._folder}: {entry.id} is for the model {entry.model}, and this is {model}: "
                    "use another folder, or serve that one first"
                )
        yield from sorted(found, key=lambda entry: (entry.created_at, entry.id))

    def remove(self, name: str) -> None:
        """Delete a request that has ended. Idempotent."""
        if NAME.fullmatch(name):
            shutil.rmtree(self._folder / name, ignore_errors=True)


def _as_json(entry: JournaledRequest) -> dict[str, Any]:
    plain = {
        name: getattr(entry, name)
        for name in ("id", "model", "route", "request", "seed", "owner", "created_at", "key", "digest")
    }
    done = [
        {"figures": asdict(each.figures), "reason": each.reason, "prompt_tokens": each.prompt_tokens}
        for each in entry.kept.done
    ]
    has_mask = entry.uploads.mask is not None
    return {
        "format": FORMAT,
        **plain,
        "done": done,
        "partial": list(entry.kept.partial),
        "uploads": len(entry.uploads.images),
        "has_mask": has_mask,
        "is_suspended": entry.kept.suspended is not None,
    }


def _read(path: Path) -> JournaledRequest:
    """Return the request of a folder. Raises PlanError, OSError, KeyError, TypeError and ValueError."""
    facts = read_object(path / REQUEST)
    if facts["format"] != FORMAT or facts["id"] != path.name:
        raise ValueError(f"it has format {facts['format']!r} and is {facts['id']!r}")
    kept = UnfinishedCall(
        tuple(_done(path, number, each) for number, each in enumerate(facts["done"])),
        SuspendedCall.load(path / CALL) if facts["is_suspended"] else None,
    )
    step, sent = facts["partial"]
    kept.partial = int(step), int(sent)
    texts = {name: str(facts[name]) for name in ("model", "route", "owner", "key", "digest")}
    return JournaledRequest(
        id=path.name,
        request=dict(facts["request"]),
        seed=int(facts["seed"]),
        created_at=int(facts["created_at"]),
        uploads=_uploads(path, int(facts["uploads"]), bool(facts["has_mask"])),
        kept=kept,
        **texts,
    )


def _done(path: Path, number: int, facts: Any) -> CompletedImage:
    figures = facts["figures"]
    return CompletedImage(
        image_index=number,
        image=_image(path / f"image-{number}.png"),
        figures=ImageFigures(
            plan=str(figures["plan"]),
            seconds=float(figures["seconds"]),
            ranks=int(figures["ranks"]),
            steps=int(figures["steps"]),
        ),
        reason=str(facts["reason"]),
        prompt_tokens=int(facts["prompt_tokens"]),
    )


def _uploads(path: Path, count: int, has_mask: bool) -> Uploads:
    images = tuple(_image(path / f"upload-{number}.png") for number in range(count))
    return Uploads(images=images, mask=_image(path / MASK).convert("L") if has_mask else None)


def _image(path: Path) -> Any:
    with path.open("rb") as file:
        return read_image_file(file, path.name, most_pixels=MAX_PIXELS, formats=("PNG",))
