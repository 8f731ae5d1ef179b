"""Arguments of the pipeline for the length of a video."""

from typing import Any

from patchpar.models.info import PipelineInfo
from patchpar.serving.request_error import RequestError
from patchpar.serving.settings import RequestLimits
from patchpar.serving.video_request import VideoRequest

FRAMES = "num_frames"
DEFAULT_FPS = 16
RATES = ("frame_rate", "fps")
"""Names by which pipelines take the frames per second that a video is made for."""


def video_arguments(request: VideoRequest, model: PipelineInfo, limits: RequestLimits) -> dict[str, Any]:
    """Return the arguments for length and frame rate. Raises RequestError beyond the limit of frames."""
    known = model.parameters
    wanted = request.frames_at(frame_rate_of(request, model))
    named = "seconds" if request.seconds is not None else FRAMES
    if wanted is not None and FRAMES not in known:
        raise RequestError(
            f"{named}: this model, a {model.pipeline}, makes videos of one length: leave it out",
            param=named,
            code="unsupported_parameter",
        )
    count = wanted or known.get(FRAMES) or 0
    if count > limits.frames:
        raise RequestError(
            f"{named}: {count} frames, and at most {limits.frames} are made", param=named, code="above_limit"
        )
    frames = {} if wanted is None else {FRAMES: wanted}
    return {**frames, **{name: request.fps for name in RATES if name in known and request.fps is not None}}


def frame_rate_of(request: VideoRequest, model: PipelineInfo) -> int:
    """Return the frames per second of the file: those of the request, else the pipeline's own, else 16."""
    own = next((model.parameters[name] for name in RATES if isinstance(model.parameters.get(name), int)), None)
    return request.fps or own or DEFAULT_FPS
