"""This rank's transport to the other ranks of a pipeline, connected when it is first needed."""

from patchpar.comm.collectives import Communicator
from patchpar.comm.transport import Transport, alone, connect, extend, watched
from patchpar.launch.executor import RankContext


class RankConnection:
    """`transport`: None until a call needs it. It does not know the pipeline, which others free with the last name."""

    def __init__(self, context: RankContext) -> None:
        self._context = context
        self.transport: Transport | None = None

    def connected(self) -> Transport:
        """Return the transport, connected with the ranks of this call if it is not yet. Collective."""
        if self.transport is None:
            several = self._context.world_size > 1
            transport = connect(self._context, ranks=self._context.ranks) if several else alone(self._context)
            self.transport = watched(transport, self._context)
        return self.transport

    def reach(self) -> bool:
        """Connect with all ranks of this call. Returns whether messages of earlier ones may have been lost."""
        if self.transport is None:
            self.connected()
            return False
        return extend(self.transport, self._context, self._context.ranks)

    def communicator(self) -> Communicator:
        """Return one of its own, over the transport. Collective."""
        return Communicator(self.connected(), self._context.beat, self._context.seal)
