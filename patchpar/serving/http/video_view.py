"""The JSON of a video."""

from typing import Any

from patchpar.serving.http.jobs import error_of
from patchpar.serving.kept_jobs import KeptJob
from patchpar.serving.service import ImageService
from patchpar.serving.video_call import frame_rate_of
from patchpar.serving.video_files import StoredVideo
from patchpar.serving.video_request import VideoRequest

STATUSES = {"cancelled": "failed"}
"""OpenAI's clients know no cancelled video: it has failed, with the code "cancelled"."""


def video_view(service: ImageService, kept: KeptJob) -> dict[str, Any]:
    """Return the JSON of a video, with OpenAI's fields, and `patchpar` with figures once it is there."""
    wanted: VideoRequest = kept.work.request
    stored = kept.result if isinstance(kept.result, StoredVideo) else None
    fps = frame_rate_of(wanted, service.generator.description)
    width, height = kept.call.size if stored is None else stored.size
    frames = wanted.frames_at(fps) or service.generator.description.parameters.get("num_frames") or 0
    seconds = stored.seconds if stored is not None else frames / fps
    return {
        "id": kept.id,
        "object": "video",
        "status": STATUSES.get(kept.status, kept.status),
        "progress": kept.progress,
        "created_at": kept.created_at,
        "completed_at": kept.completed_at,
        "expires_at": service.kept.expires_at(kept),
        "error": error_of(kept),
        "prompt": wanted.prompt,
        "seconds": f"{seconds:g}",
        "size": f"{width}x{height}",
        "model": service.name,
        "patchpar": {"seed": kept.call.seed, **(_figures(stored) if stored is not None else {})},
    }


def _figures(stored: StoredVideo) -> dict[str, Any]:
    return {
        "frames": stored.frames,
        "fps": stored.fps,
        "plan": stored.figures.plan,
        "reason": stored.reason,
        "ranks": stored.figures.ranks,
        "computing_seconds": round(stored.figures.seconds, 4),
        "steps": stored.figures.steps,
        "recovered": stored.figures.recovered,
    }
