"""A block's plan applied to a call of the block: which leaves of its arguments are cut, by their number.

Names are looked up once for each form of a call, since a block may be called some thousand times for an image.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from patchpar.shard.transformer.local_tokens import LocalTokens
from patchpar.shard.transformer.probe.capture import CallArguments
from patchpar.shard.transformer.token_mixing import TokenMixing
from patchpar.shard.transformer.token_plan import BlockPlan, TextPlan, TokenPlan, TokenRows

NO_TEXT = TextPlan(inputs={}, attentions=(), outputs={})
PLAIN: tuple[type, ...] = (int, float, str, bool, type(None))
"""Types of leaves that are no tensors."""
_LEAVES = (Tensor, *PLAIN)


@dataclass(frozen=True, slots=True)
class ArgumentRule:
    """What to do with the leaves of a call. `plan` None: every rank computes the whole block.

    `text` and `text_counts`: those of a second run of tokens. `has_numbers`: whether any leaf is a number of tokens.
    """

    plan: BlockPlan | None
    inputs: tuple[tuple[int, TokenRows], ...] = ()
    counts: tuple[int, ...] = ()
    row_counts: tuple[int, ...] = ()
    frame_counts: tuple[int, ...] = ()
    bounds: tuple[int, ...] = ()
    text: tuple[tuple[int, TokenRows], ...] = ()
    text_counts: tuple[int, ...] = ()
    has_numbers: bool = field(init=False)

    def __post_init__(self) -> None:
        """Compute what every block asks, once."""
        numbers = (*self.counts, *self.row_counts, *self.frame_counts, *self.bounds, *self.text_counts)
        object.__setattr__(self, "has_numbers", bool(numbers))


class ArgumentRules:
    """The rules of one block, by the form of the call."""

    def __init__(self, plan: TokenPlan, path: str, module: nn.Module) -> None:
        self._plan, self._path, self._module = plan, path, module
        self._found: dict[Any, ArgumentRule] = {}

    def find(self, form: Any, args: Any, kwargs: Any) -> ArgumentRule:
        """Return the rule for this call; `form` is of (args, kwargs). Raises UnsupportedModel."""
        rule = self._found.get(form)
        if rule is None:
            rule = self._found[form] = self._made(CallArguments.of(self._module, args, kwargs))
        return rule

    def _made(self, arguments: CallArguments) -> ArgumentRule:
        plan = self._plan.find(self._path, arguments.signature())
        if plan is None:
            return ArgumentRule(None)
        numbers = {name: number for number, name in enumerate(arguments.leaves())}
        mixing, text = plan.mixing or TokenMixing(), plan.text or NO_TEXT

        def listed(names: tuple[str, ...]) -> tuple[int, ...]:
            return tuple(numbers[name] for name in names)

        return ArgumentRule(
            plan,
            inputs=tuple((numbers[name], rows) for name, rows in plan.inputs.items()),
            counts=listed(plan.counts),
            row_counts=listed(mixing.row_counts),
            frame_counts=listed(mixing.frame_counts),
            bounds=listed(plan.bounds),
            text=tuple((numbers[name], rows) for name, rows in text.inputs.items()),
            text_counts=listed(text.counts),
        )


def leaves_and_form(tree: Any) -> tuple[list[Any], Any]:
    """Return the leaves of arguments or outputs as torch's pytree orders them, and the form, which is hashable.

    The form has the types of containers and leaves, of tensors the number of dims.
    """
    leaves: list[Any] = []
    return leaves, _form_of(tree, leaves)


def _form_of(tree: Any, leaves: list[Any]) -> Any:
    kind: Any = type(tree)
    if kind is not tuple and kind is not list and kind is not dict:
        return _form_of_leaf(tree, kind, leaves)
    form: list[Any] = [kind, tuple(tree)] if kind is dict else [kind]
    for each in tree.values() if kind is dict else tree:
        kind = type(each)  # a call for each leaf would cost as much as all else
        if kind is Tensor or kind is LocalTokens:
            leaves.append(each)
            form.append((each if kind is Tensor else each.own).ndim)
        elif kind in PLAIN:
            leaves.append(each)
            form.append(kind)
        else:
            form.append(_form_of(each, leaves))
    return tuple(form)


def _form_of_leaf(tree: Any, kind: type, leaves: list[Any]) -> Any:
    if isinstance(tree, _LEAVES):
        leaves.append(tree)
        return tree.own.ndim if isinstance(tree, LocalTokens) else tree.ndim if isinstance(tree, Tensor) else kind
    found, spec = tree_flatten(tree)  # an object, or a container of another kind
    leaves += found
    return _Node(spec, str(spec), tuple(_form_of(each, []) if each is not tree else kind for each in found))


@dataclass(frozen=True, slots=True)
class _Node:
    """A container of a kind that torch's pytree knows, or an object, which is a leaf. `text`: its spec, hashable."""

    spec: Any
    text: str
    forms: tuple[Any, ...]

    def __hash__(self) -> int:
        return hash((self.text, self.forms))


def with_leaves(form: Any, leaves: Sequence[Any]) -> Any:
    """Return the tree of that form with these leaves."""
    return _filled(form, iter(leaves))


def _filled(form: Any, leaves: Iterator[Any]) -> Any:
    if isinstance(form, _Node):
        return tree_unflatten([next(leaves) for _ in form.forms], form.spec)
    if not isinstance(form, tuple):
        return next(leaves)
    kind = form[0]
    items = form[2:] if kind is dict else form[1:]
    found: list[Any] = []
    for each in items:
        inner = type(each)
        found.append(_filled(each, leaves) if inner is tuple or inner is _Node else next(leaves))
    return dict(zip(form[1], found, strict=True)) if kind is dict else kind(found)
