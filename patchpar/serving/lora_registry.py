"""LoRAs of a server: loaded once on all ranks, and selected by name in each request."""

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from patchpar.errors import PatchparError, PlanError
from patchpar.models.adapters import load_lora
from patchpar.serving.pipeline_fields import MAX_SCALE, LoraField
from patchpar.serving.request_error import RequestError, nearest

NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
METHOD = "load_lora_weights"


@dataclass(frozen=True, slots=True, kw_only=True)
class RegisteredLora:
    """A LoRA by its name in requests. `source`: a file, a folder, or a name of the hub.

    `scale`: of requests that give none. Raises PlanError for a name that is none, and a scale out of bounds.
    """

    name: str
    source: str
    scale: float = 1.0

    def __post_init__(self) -> None:
        if not NAME.fullmatch(self.name):
            raise PlanError(f"LoRA {self.name[:80]!r}: a name has letters, digits, - and _, 64 at most")
        if not -MAX_SCALE <= self.scale <= MAX_SCALE:
            raise PlanError(f"LoRA {self.name}: scale {self.scale:g}: use -{MAX_SCALE:g} to {MAX_SCALE:g}")

    def load_into(self, pipe: Any) -> None:
        """Load it on all ranks, to act in no call that does not select it.

        Raises PlanError for a model without LoRAs, and a file that has none for it.
        """
        if METHOD not in pipe.description.methods:
            raise PlanError(f"LoRA {self.name}: this model, a {pipe.description.pipeline}, takes no LoRAs")
        try:
            load_lora(pipe, self.source, self.name)
            if not any(self.name in names for names in pipe.get_list_adapters().values()):
                raise ValueError("it has no weights for the networks of this model")
            pipe.disable_lora()
        except (ValueError, KeyError, TypeError, OSError, RuntimeError) as error:  # of diffusers and torch
            if isinstance(error, PatchparError) and not isinstance(error, PlanError):  # of a rank, not of the file
                raise
            with suppress(Exception):  # what was loaded of it until then
                pipe.delete_adapters(self.name)
            raise PlanError(f"LoRA {self.name}: {self.source} cannot be loaded: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    """Return the line of a message that says why: of torch, which lists tensors, the first whose shape is another."""
    lines = str(error).splitlines() or ["no message"]
    return next((line.strip() for line in lines if "size mismatch" in line), lines[0])[:300]


class LoraRegistry:
    """The LoRAs that requests may select."""

    def __init__(self) -> None:
        self._known: dict[str, RegisteredLora] = {}
        self.is_used = False
        """Whether any LoRA has been loaded, so that each call has to say which of them act."""

    @property
    def names(self) -> tuple[str, ...]:
        """Their names, in order."""
        return tuple(sorted(self._known))

    @property
    def loras(self) -> tuple[RegisteredLora, ...]:
        """The LoRAs, by name."""
        return tuple(self._known[name] for name in self.names)

    def load(self, lora: RegisteredLora, pipe: Any) -> None:
        """Load a LoRA on all ranks. Raises PlanError for a name that is taken, and as RegisteredLora.load_into does."""
        self.check_new(lora.name)
        lora.load_into(pipe)
        self._known[lora.name] = lora
        self.is_used = True

    def check_new(self, name: str) -> None:
        """Raise PlanError for a name that is taken."""
        if name in self._known:
            raise PlanError(f"LoRA {name}: there is one of that name: remove it first, or use another name")

    def check_known(self, name: str) -> None:
        """Raise RequestError, 404, for an unknown name."""
        self._check(name, "name", status=404)

    def remove(self, name: str, pipe: Any) -> None:
        """Delete a LoRA on all ranks. Raises as `check_known` does."""
        self.check_known(name)
        pipe.delete_adapters(name)
        del self._known[name]

    def scales_of(self, wanted: Sequence[LoraField] | None) -> Mapping[str, float]:
        """Return the scales of a request's LoRAs. Raises RequestError for a name that is unknown, or there twice."""
        found: dict[str, float] = {}
        for number, each in enumerate(wanted or ()):
            param = f"lora.{number}.name"
            self._check(each.name, param)
            if each.name in found:
                raise RequestError(f"lora: {each.name!r} is there twice: give it once", param=param)
            found[each.name] = self._known[each.name].scale if each.scale is None else each.scale
        return found

    def adapters(self, scales: Mapping[str, float]) -> Mapping[str, float] | None:
        """Return the adapters of a call; None on a server that has never had any.

        Raises RequestError for a LoRA that was removed since the request was checked.
        """
        for name in scales:
            self._check(name, "lora")
        return scales if self.is_used else None

    def _check(self, name: str, param: str, *, status: int = 400) -> None:
        if name in self._known:
            return
        near = nearest(name[:80], self._known)
        known = ", ".join(self.names) or "none: the server was started without --lora"
        hint = f"did you mean {near!r}?" if near else f"there are {known}"
        raise RequestError(
            f"lora: {name[:80]!r} is not registered; {hint}", status=status, param=param, code="lora_not_found"
        )
