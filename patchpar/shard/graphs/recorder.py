"""Capture of a step as a graph of the device, whose replay is one launch for all kernels and messages of the step.

Nothing else in this folder knows the device: a recorder of another kind can take the place of this one.

NCCL ends no communicator while there is a graph with operations of it: `StreamWaits` knows the graphs, and they are
released before the process leaves its groups.
"""

import atexit
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any, Protocol

import torch

from patchpar.comm.transport import Transport
from patchpar.comm.transport.stream_waits import StreamWaits
from patchpar.comm.transport.torch_p2p import TorchTransport
from patchpar.errors import ExchangeError, PatchparError, UnsupportedModel
from patchpar.launch.accelerators import device_module, has_graphs, untaken_fraction


class CaptureRefused(Exception):
    """A step that cannot be captured; the message is the reason."""


class CapturedStep(Protocol):
    """A captured step, which the capture has not run.

    `output`: its tree of tensors, which each replay writes to. `fraction`: what it has taken of the device's memory, 0
    to 1; `untaken`: what it has left of that.
    """

    output: Any
    fraction: float
    untaken: float

    def replay(self) -> None:
        """Run the step again, on the memory of the capture."""


class StepRecorder(Protocol):
    """What captures steps. `what` names the step for errors."""

    def capture(self, step: Callable[[], Any], what: str) -> CapturedStep:
        """Return what `step` does. Raises CaptureRefused."""


class GraphRecorder:
    """Captures steps as graphs of the GPU `device` with the messages of NCCL in them. Each graph has memory of its own.

    `waits`: what watches the stream; None on a rank that has no messages of NCCL.
    """

    def __init__(self, device: torch.device, waits: StreamWaits | None) -> None:
        self._device, self._module, self._waits = device, device_module(device.type), waits
        self._stream: Any = None
        if waits is not None:
            _release_at_exit(waits)

    def capture(self, step: Callable[[], Any], what: str) -> CapturedStep:
        """See `StepRecorder`. The step does not run before the first replay."""
        graph, pool = self._module.CUDAGraph(), self._module.graph_pool_handle()
        untaken, stream = untaken_fraction(self._device), self._module.current_stream(self._device)
        if self._stream is None:  # torch's own is one for the process, of the device that was captured on first
            self._stream = self._module.Stream(self._device)
        try:
            # Other threads of the process, such as those of libraries, may use the GPU meanwhile.
            captured = self._module.graph(graph, pool, self._stream, "thread_local")
            unwatched = nullcontext() if self._waits is None else self._waits.capturing()
            with unwatched, without_kept_casts(self._device.type), captured:
                output = step()
        except BaseException as error:
            self._module.set_stream(stream)  # torch leaves that of a capture which it could not end
            _end_capture(self._module, graph, pool, self._device)
            if isinstance(error, PatchparError) or not isinstance(error, RuntimeError):
                raise
            raise CaptureRefused(f"the device refuses the capture: {str(error).splitlines()[0]}") from error
        if self._waits is not None:
            self._waits.add_graph(graph)
        found = _DeviceGraph(graph, output, self._module, self._waits, what)
        found.untaken = untaken_fraction(self._device)
        found.fraction = max(0.0, untaken - found.untaken)
        return found


def _end_capture(module: Any, graph: Any, pool: Any, device: torch.device) -> None:
    """End a capture that has failed for torch too, some versions of which go on as if it had not ended.

    Their allocator returns no memory to the device any more, and their default generator samples no numbers.
    """
    with suppress(RuntimeError):
        graph.pool()
        return  # it has ended
    index = module.current_device() if device.index is None else device.index
    for name in ("_cuda_endAllocateToPool", "_cuda_endAllocateCurrentStreamToPool", "_cuda_releasePool"):
        with suppress(RuntimeError, AttributeError):  # what torch has done already, or has under the other name
            getattr(torch._C, name)(index, pool)
    with suppress(RuntimeError):  # the error to be raised is that of the capture
        generator, state = module.default_generators[index], module.get_rng_state(index)
        try:
            torch.rand((), device=torch.device(device.type, index))
        except RuntimeError:
            generator.graphsafe_set_state(generator.clone_state())
        module.set_rng_state(state, index)


class _DeviceGraph:
    """A graph of the device. The end of each replay is watched from outside: one deadline for all waits in it."""

    def __init__(self, graph: Any, output: Any, module: Any, waits: StreamWaits | None, what: str) -> None:
        self.output, self.fraction, self.untaken = output, 0.0, 1.0
        self._graph, self._module, self._waits, self._what = graph, module, waits, what

    def replay(self) -> None:
        """See `CapturedStep`. Returns at once. Raises ExchangeError if the graph has been released."""
        what = self._what  # what watches the replay does not keep the graph
        try:
            with nullcontext() if self._waits is None else self._waits.replays:
                self._graph.replay()
        except RuntimeError as error:
            raise ExchangeError(f"{what}: its graph cannot be replayed: {str(error).partition(chr(10))[0]}") from error
        if self._waits is None:  # it waits for no other rank
            return
        end = self._module.Event()
        end.record()
        self._waits.watch(
            end.query, lambda: f"{what}: the replay of its graph (graphs=False runs without) has not ended"
        )


@contextmanager
def without_kept_casts(kind: str) -> Iterator[None]:
    """Context in which autocast, where it is on for devices of type `kind`, keeps no casts of weights.

    A graph would read those of before, which are freed at the end of autocast, and leave those that it writes. Compiled
    code is compiled anew where this has changed, which a capture has no time for: the step before it runs so too.
    """
    if not torch.is_autocast_enabled(kind):
        yield
        return
    keeps = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(keeps)


def _release_at_exit(waits: StreamWaits) -> None:
    """Release the graphs of `waits` when the process ends, before it leaves groups that were formed earlier."""
    known = weakref.ref(waits)

    def release() -> None:
        found = known()
        if found is not None:
            found.release_graphs()

    atexit.register(release)


def recorder_for(transport: Transport, *, with_messages: bool = True) -> StepRecorder:
    """Return what captures the steps of a rank. Raises UnsupportedModel where its device or transport has no graphs.

    `with_messages`: whether ranks exchange anything in a step.
    """
    kind = transport.device.type
    if not has_graphs(kind):
        raise UnsupportedModel(f"devices of type {kind!r} cannot capture steps as graphs")
    waits = transport.waits if isinstance(transport, TorchTransport) else None
    if with_messages and waits is None:
        raise UnsupportedModel(
            "messages between these ranks pass through memory of the host, which a graph of the GPU cannot repeat: "
            "graphs need NCCL, and so a GPU for each rank"
        )
    return GraphRecorder(transport.device, waits)
