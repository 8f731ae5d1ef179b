"""Where the process has work beside the launches of kernels: it begins a block, an exchange, or a copy."""

from patchpar.plan.replay.tape import AGAIN, COPIED, Boundary, Kernel, Leave, Receive, Send, Wait


def is_copy(entry: Boundary | Kernel | Send | Receive | Wait | Leave) -> bool:
    """Whether a rank begins to copy from the host's memory, see `COPIED`."""
    return isinstance(entry, Send) and entry.kind == COPIED


class Exchanges:
    """Tells where the process begins an exchange: an exchange point, or another operation of several ranks there."""

    def __init__(self) -> None:
        self._where, self._operation = "", 0

    def begins(self, entry: Boundary | Kernel | Send | Receive | Wait | Leave) -> bool:
        """Whether an entry is the first message of one."""
        if isinstance(entry, (Kernel, Boundary)):
            self._where = ""
            return False
        before, self._where = self._where, entry.where
        if not isinstance(entry, (Send, Receive)) or is_copy(entry):
            return False
        is_other = before != entry.where
        if is_other:
            self._operation = 0
        if isinstance(entry, Send):
            is_other |= 0 != self._operation != entry.operation
            self._operation = entry.operation
        return is_other


class OuterBlocks:
    """Tells blocks that are in no other one from those inside them."""

    def __init__(self) -> None:
        self._last = ""

    def begins(self, boundary: Boundary) -> bool:
        """Whether such a block begins here."""
        if boundary.is_step or boundary.name == AGAIN:
            self._last = ""
            return False
        if self._last and boundary.name.startswith(f"{self._last}."):
            return False
        self._last = boundary.name
        return True
