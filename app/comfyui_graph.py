"""Parameters in a graph of ComfyUI, which its images have in their text chunk `prompt`.

    {"3": {"class_type": "KSampler", "inputs": {"seed": 7, "steps": 20, "cfg": 8, "positive": ["6", 0], ...}}, ...}

An input is a value, or a link: a node, and which of its outputs. Nodes are known by their inputs rather than by their
class, since those of other packages mostly have the inputs of ComfyUI's own.
"""

import json
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from patchpar import PlanError

from .limits import FILE

MAX_NODES = 1000
MAX_SAMPLERS = 16  # each is looked at with all that leads to it
TEXTS = ("text", "text_g", "text_l", "clip_l", "t5xxl", "prompt")  # inputs of nodes that encode a prompt
PARTS = ("guider", "noise")  # nodes that hold inputs of a sampler
BRANCHES = ("positive", "negative")  # inputs, and first outputs, of nodes between texts and sampler
NO_TEXT = "ConditioningZeroOut"
NUMBER = (int, float)
BY_HAND = "fill in the fields by hand"


class Link(NamedTuple):
    """An output of a node: 0, or 1 for any other."""

    node: str
    output: int


@dataclass(frozen=True, slots=True)
class ComfyGraph:
    """The nodes of a graph by their names: what class each is, and its inputs by name."""

    classes: Mapping[str, str]
    inputs: Mapping[str, Mapping[str, Any]]

    @classmethod
    def read(cls, text: str) -> "ComfyGraph":
        """From the text chunk. Raises PlanError for what is no such graph, or has more than MAX_NODES nodes."""
        try:
            found = json.loads(text)
            nodes = {name: (str(node["class_type"]), dict(node["inputs"])) for name, node in found.items()}
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise PlanError(f"{FILE} has a graph of ComfyUI that cannot be read: {BY_HAND}") from error
        if len(nodes) > MAX_NODES:
            raise PlanError(f"{FILE} has a graph of ComfyUI with {len(nodes)} nodes: at most {MAX_NODES} are read")
        return cls({name: kind for name, (kind, _) in nodes.items()}, {name: own for name, (_, own) in nodes.items()})

    def arguments(self) -> dict[str, Any]:
        """Arguments of a request: those of the first pass. Raises PlanError for a prompt that nodes compute."""
        own = self.inputs[self._sampler()]
        parts = [self._linked(own.get(part)) for part in PARTS]
        own = {name: value for each in (*parts, own) for name, value in each.items()}
        positive = own.get("positive", own.get("conditioning"))
        guidance = self._find(positive, "guidance", NUMBER)  # of distilled models, whose cfg is 1
        steps = self._find(own["sigmas"], "steps", int) if "sigmas" in own else self._value(own.get("steps"), int)
        numbers = {
            "width": self._find(own["latent_image"], "width", int),
            "height": self._find(own["latent_image"], "height", int),
            "steps": steps,
            "guidance": self._value(own.get("cfg"), NUMBER) if guidance is None else guidance,
            "seed": self._value(own.get("seed", own.get("noise_seed")), int),
        }
        texts = {
            "prompt": self._text(positive, "prompt"),
            "negative": self._text(own.get("negative"), "negative prompt"),
        }
        return {**texts, **{name: value for name, value in numbers.items() if value is not None}}

    def loras(self) -> str:
        """Names and weights of the LoRAs of the first pass. Raises PlanError without a sampler."""
        found = [own for own in self._above(self._sampler()) if "lora_name" in own]
        return ", ".join(f"{own['lora_name']}:{own.get('strength_model', 1)}" for own in found)

    def _sampler(self) -> str:
        """The sampler that begins with no other one's latents. Raises PlanError without any."""
        samplers = [name for name, own in self.inputs.items() if _samples(own)]
        for name in samplers[:MAX_SAMPLERS]:
            link = _link(self.inputs[name]["latent_image"])
            if link is None or not any(map(_samples, self._above(link.node))):
                return name
        raise PlanError(f"{FILE} has a graph of ComfyUI without a sampler that is known here: {BY_HAND}")

    def _above(self, name: str) -> Iterator[Mapping[str, Any]]:
        """Inputs of a node, then of all that lead to it, the nearest first."""
        waiting, seen = deque([name]), {name}
        while waiting:
            own = self.inputs.get(waiting.popleft(), {})
            yield own
            for link in map(_link, own.values()):
                if link is not None and link.node not in seen:
                    seen.add(link.node)
                    waiting.append(link.node)

    def _linked(self, value: Any) -> Mapping[str, Any]:
        """Inputs of the node that a link leads to."""
        link = _link(value)
        return {} if link is None else self.inputs.get(link.node, {})

    def _value(self, value: Any, kind: Any) -> Any:
        """A value of this kind, as it is or the only one of a node that it is linked to; None for any other."""
        values = [value] if _link(value) is None else [*self._linked(value).values()]
        found = [each for each in values if isinstance(each, kind) and not isinstance(each, bool)]
        return found[0] if len(found) == 1 else None

    def _find(self, value: Any, name: str, kind: Any) -> Any:
        """The input of this name of the nearest node that leads here and has one; None without any."""
        link = _link(value)
        values = () if link is None else (own[name] for own in self._above(link.node) if name in own)
        return next((found for each in values if (found := self._value(each, kind)) is not None), None)

    def _text(self, value: Any, what: str) -> str:
        """The text that a conditioning is encoded from. Raises PlanError for several, and one that nodes compute."""
        found = {text for text in self._texts(value) if text != ""}
        known = [text for text in found if text is not None]
        if len(found) > 1 or len(known) < len(found):
            raise PlanError(f"{FILE} has a graph of ComfyUI whose {what} is made by several nodes: {BY_HAND}")
        return known[0] if known else ""

    def _texts(self, value: Any) -> Iterator[str | None]:
        """Texts that a conditioning is encoded from; None for one that nodes compute."""
        waiting, seen = deque([_link(value)]), set[Link]()
        while waiting:
            link = waiting.popleft()
            if link is None or link in seen or self.classes.get(link.node) == NO_TEXT:
                continue
            seen.add(link)
            own = self.inputs.get(link.node, {})
            texts = [own[name] for name in TEXTS if name in own]
            yield from (self._value(text, str) for text in texts)
            waiting.extend([] if texts else map(_link, _conditionings(own, link.output)))


def _link(value: Any) -> Link | None:
    is_one = isinstance(value, list) and len(value) == 2 and isinstance(value[0], str) and isinstance(value[1], int)
    return Link(value[0], int(value[1] > 0)) if is_one else None


def _samples(own: Mapping[str, Any]) -> bool:
    return "latent_image" in own and ("positive" in own or "guider" in own)


def _conditionings(own: Mapping[str, Any], output: int) -> list[Any]:
    """The inputs that an output of a node between texts and sampler is made of."""
    if all(name in own for name in BRANCHES):
        return [own[BRANCHES[output]]]
    return [value for name, value in own.items() if "conditioning" in name] or [*own.values()]
