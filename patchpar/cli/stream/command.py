"""`patchpar stream`: output of a video while it is generated, or image-to-image on a stream of frames."""

from patchpar.cli.console import friendly_errors
from patchpar.cli.stream.flags import StreamFlags


def stream(request: StreamFlags) -> None:
    """Stream a video with audio while it is generated."""
    with friendly_errors(request.debug):
        request.check()
        if request.dry_run:
            from patchpar.cli.stream.forecast import forecast

            forecast(request)
        elif not request.is_video:
            from patchpar.cli.stream.images import stream_images

            stream_images(request)
        else:
            from patchpar.cli.stream.video import stream_video

            stream_video(request)
