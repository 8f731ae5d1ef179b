"""The body of a request for a video: OpenAI's fields and ours."""

from typing import Annotated

from pydantic import Field

from patchpar.serving.pipeline_fields import PipelineFields, Text, from_json, from_texts
from patchpar.serving.request_error import RequestError


class VideoRequest(PipelineFields):
    """The fields of POST /v1/videos beside its file, `input_reference`. `seconds`: of the video, a number or its text.

    `fps`: frames per second of the file.
    """

    seconds: Text | int | float | None = None
    fps: Annotated[int, Field(ge=1, le=120)] | None = None
    num_frames: Annotated[int, Field(ge=1)] | None = None

    def frames_at(self, fps: int) -> int | None:
        """Return the number of frames that is asked for, None for the pipeline's own. Raises RequestError.

        `fps`: frames per second of the file.
        """
        if self.seconds is None:
            return self.num_frames
        if self.num_frames is not None:
            raise _wrong_seconds("seconds and num_frames: give one of them")
        try:
            count = float(self.seconds) * fps
        except (ValueError, OverflowError):
            raise _wrong_seconds(f"seconds={str(self.seconds)[:40]!r}: it must be a number, such as 4") from None
        if not 0 < count < float("inf"):
            raise _wrong_seconds(f"seconds={self.seconds!r:.40}: it must be more than 0, and finite")
        return max(1, round(count))


def parse_video(body: bytes) -> VideoRequest:
    """Return the request of a JSON body. Raises RequestError that names the first wrong field."""
    return from_json(VideoRequest, body)


def parse_video_form(values: dict[str, str]) -> VideoRequest:
    """Return the request of a form's text fields. Raises RequestError that names the first wrong field."""
    return from_texts(VideoRequest, values)


def _wrong_seconds(message: str) -> RequestError:
    return RequestError(message, param="seconds")


FIELDS: tuple[str, ...] = tuple(VideoRequest.model_fields)
