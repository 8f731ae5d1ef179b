"""A block's plan applied to a call of the block: which leaves of its arguments are cut, by their number.

Names are looked up once for each signature, since a block may be called some thousand times for an image.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import TreeSpec

from patchpar.shard.transformer.probe.capture import CallArguments
from patchpar.shard.transformer.token_mixing import TokenMixing
from patchpar.shard.transformer.token_plan import BlockPlan, TokenPlan, TokenRows


@dataclass(frozen=True, slots=True)
class ArgumentRule:
    """What to do with the leaves of a call. `plan` None: every rank computes the whole block."""

    plan: BlockPlan | None
    inputs: tuple[tuple[int, TokenRows], ...] = ()
    counts: tuple[int, ...] = ()
    row_counts: tuple[int, ...] = ()
    frame_counts: tuple[int, ...] = ()
    bounds: tuple[int, ...] = ()


class ArgumentRules:
    """The rules of one block, by the signature of the call."""

    def __init__(self, plan: TokenPlan, path: str, module: nn.Module) -> None:
        self._plan, self._path, self._module = plan, path, module
        self._found: list[tuple[TreeSpec, tuple[object, ...], ArgumentRule]] = []

    def find(self, leaves: Sequence[Any], spec: TreeSpec, args: Any, kwargs: Any) -> ArgumentRule:
        """Return the rule for this call; `leaves` and `spec` are of (args, kwargs). Raises UnsupportedModel."""
        sorts = tuple(leaf.ndim if isinstance(leaf, Tensor) else type(leaf) for leaf in leaves)
        for known_spec, known_sorts, rule in self._found:
            if known_sorts == sorts and known_spec == spec:
                return rule
        rule = self._made(CallArguments.of(self._module, args, kwargs))
        self._found.append((spec, sorts, rule))
        return rule

    def _made(self, arguments: CallArguments) -> ArgumentRule:
        plan = self._plan.find(self._path, arguments.signature())
        if plan is None:
            return ArgumentRule(None)
        numbers = {name: number for number, name in enumerate(arguments.leaves())}
        inputs = tuple((numbers[name], rows) for name, rows in plan.inputs.items())
        mixing = plan.mixing or TokenMixing()
        counts = (plan.counts, mixing.row_counts, mixing.frame_counts, plan.bounds)
        return ArgumentRule(plan, inputs, *(tuple(numbers[name] for name in each) for each in counts))
