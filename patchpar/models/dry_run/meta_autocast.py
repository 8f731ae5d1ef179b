"""torch.autocast of the meta device, which torch does not know: nothing is cast there.

Code asks for it to leave a part of a network as it is, such as the angles of a rotary embedding in float32.
"""

import threading
from functools import wraps
from typing import Any

import torch

TORCHS = torch.autocast.__init__
NAME = "__init__"


@wraps(TORCHS)  # torch.compile asks for its arguments
def _made(self: torch.autocast, device_type: str, *args: Any, **kwargs: Any) -> None:
    if device_type == "meta":
        TORCHS(self, "cpu", enabled=False)
    else:
        TORCHS(self, device_type, *args, **kwargs)


class MetaAutocast:
    """Puts `_made` in torch.autocast while any thread needs it; that of other devices is as it was."""

    def __init__(self) -> None:
        self._lock, self._users = threading.Lock(), 0

    def add_user(self) -> None:
        """Replace the function for the first user, unless another library has."""
        with self._lock:
            if not self._users and torch.autocast.__init__ is TORCHS:
                setattr(torch.autocast, NAME, _made)
            self._users += 1

    def remove_user(self) -> None:
        """Restore the function after the last user."""
        with self._lock:
            self._users -= 1
            if not self._users and torch.autocast.__init__ is _made:
                setattr(torch.autocast, NAME, TORCHS)


META_AUTOCAST = MetaAutocast()
