"""Messages between a caller and its template process, over inherited sockets.

    caller -- ForkRequest, descriptors --> template       a stream, one request after another
    caller <-- WorkerReport -------------- template       a socket for each worker, sent with its request

A report socket that the caller closes says that it needs the worker no more.
"""

import contextlib
import json
import os
import socket
import struct
from dataclasses import asdict, dataclass

from patchpar.launch.descriptors import receive_with_descriptors

LENGTHS = struct.Struct("<II")  # bytes of the request, number of descriptors
DESCRIPTORS_PER_MESSAGE = 200  # the kernel passes at most 253
REPORT_BYTES = 1 << 16
SEND_SECONDS = 600.0  # many requests may wait in the socket for the first one's imports


@dataclass(frozen=True, slots=True, kw_only=True)
class ForkRequest:
    """A worker to fork. Its descriptors are sent too: report socket, working directory, output, and those of `numbers`.

    `numbers`: what numbers the other descriptors have in the worker; the first is that of its channel. `environment`:
    the variables that the template may have with other values, or not at all.
    """

    numbers: tuple[int, ...]
    path: tuple[str, ...]
    modules: tuple[str, ...]
    environment: dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerReport:
    """What a template has to say of a worker. One that has a `pid` comes with a descriptor of the process (pidfd).

    `code`: as in StartedProcess.returncode. `error`: why there is no process. `unfit`: why the worker was not forked
    from the template, but started as a new Python process.
    """

    pid: int | None = None
    code: int | None = None
    error: str = ""
    unfit: str = ""


class TemplateEnded(Exception):
    """The template takes no more requests."""


def send_request(requests: socket.socket, request: ForkRequest, descriptors: list[int]) -> None:
    """Send a request with its descriptors. Raises TemplateEnded, also where it takes none for SEND_SECONDS."""
    data = json.dumps(asdict(request)).encode()
    requests.settimeout(SEND_SECONDS)
    try:
        requests.sendall(LENGTHS.pack(len(data), len(descriptors)) + data)
        for start in range(0, len(descriptors), DESCRIPTORS_PER_MESSAGE):
            socket.send_fds(requests, [b"\0"], descriptors[start : start + DESCRIPTORS_PER_MESSAGE])
    except (BrokenPipeError, ConnectionResetError) as error:
        raise TemplateEnded("it has ended") from error
    except TimeoutError as error:
        raise TemplateEnded(f"it has taken no request for {SEND_SECONDS:g} s") from error


def receive_request(requests: socket.socket) -> tuple[ForkRequest, list[int]] | None:
    """Wait for the next request with its descriptors; None at end of file."""
    descriptors: list[int] = []
    try:
        size, number = LENGTHS.unpack(_receive_bytes(requests, LENGTHS.size))
        found = json.loads(_receive_bytes(requests, size))
        while len(descriptors) < number:
            data, received = receive_with_descriptors(requests, 1, DESCRIPTORS_PER_MESSAGE)
            descriptors += received
            if not data:
                raise EOFError
    except (EOFError, ConnectionResetError):
        for descriptor in descriptors:
            os.close(descriptor)
        return None
    numbers, path, modules = tuple(found["numbers"]), tuple(found["path"]), tuple(found["modules"])
    return ForkRequest(numbers=numbers, path=path, modules=modules, environment=found["environment"]), descriptors


def report_sockets() -> tuple[socket.socket, socket.socket]:
    """Return two connected sockets for the reports on one worker; neither blocks."""
    pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in pair:
        end.setblocking(False)
    return pair


def send_report(sock: socket.socket, report: WorkerReport, descriptors: tuple[int, ...] = ()) -> None:
    """Send a report; nothing happens if the caller has closed its end."""
    with contextlib.suppress(OSError):
        socket.send_fds(sock, [json.dumps(asdict(report)).encode()], descriptors)


def receive_report(sock: socket.socket) -> tuple[WorkerReport, list[int]] | None:
    """Return the next report with its descriptors; None at end of file. Raises BlockingIOError if there is none yet."""
    try:
        data, descriptors = receive_with_descriptors(sock, REPORT_BYTES, 1)
    except ConnectionResetError:
        return None
    return (WorkerReport(**json.loads(data)), descriptors) if data else None


def _receive_bytes(sock: socket.socket, number: int) -> bytes:
    data = b""
    while len(data) < number:
        piece = sock.recv(number - len(data))
        if not piece:
            raise EOFError
        data += piece
    return data
