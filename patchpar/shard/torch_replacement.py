"""A function of torch that stands aside for another one while any thread needs that."""

import threading
from collections.abc import Callable
from typing import Any


class TorchReplacement:
    """Puts `by` in the place of attribute `name` of `owner`, a module or a class, while any thread needs it.

    `before`: the function that it stands for.
    """

    def __init__(self, owner: Any, name: str, by: Callable[..., Any]) -> None:
        self._owner, self._name, self._by = owner, name, by
        self._lock, self._users = threading.Lock(), 0
        self.before: Callable[..., Any] = getattr(owner, name)

    def add_user(self) -> None:
        """Replace the function for the first user."""
        with self._lock:
            current = getattr(self._owner, self._name)
            if not self._users and current is not self._by:
                self.before = current
                setattr(self._owner, self._name, self._by)
            self._users += 1

    def remove_user(self) -> None:
        """Restore the function after the last user, unless another library has replaced it since."""
        with self._lock:
            self._users -= 1
            if not self._users and getattr(self._owner, self._name) is self._by:
                setattr(self._owner, self._name, self.before)
