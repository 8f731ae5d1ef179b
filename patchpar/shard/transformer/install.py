"""Run a token plan: hooks on the blocks split the tokens between ranks from the first block to the last.

    at a block's entry     whole arguments are cut to our tokens; outputs of a block before are cut already
    in the block           attention with the keys of all ranks: `attention`; sums and convolutions: `token_mixing_ops`
    after it               tensors keep our tokens only until a function outside the blocks reads them: then a gather

So nothing is gathered between blocks that pass tokens on, and everything the model computes between blocks is exact.

A compiled block is cut and joined outside the compiled graph, in which attention is one operator: the graph stays
whole. A compiled block that is not split gets whole tensors.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from diffusers.hooks import ModelHook
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten
from torch.utils.weak import WeakTensorKeyDictionary

from patchpar.errors import UnsupportedModel
from patchpar.shard.compiled import is_compiled
from patchpar.shard.hooks import HookSet
from patchpar.shard.sdpa import AttentionCall, as_torch_lays
from patchpar.shard.transformer.attention import TokenSplit, attend_split
from patchpar.shard.transformer.block_arguments import ArgumentRule, ArgumentRules
from patchpar.shard.transformer.block_call import BlockCall, LocalTokens
from patchpar.shard.transformer.compiled_op import answered_by, compiled_forward, traceable
from patchpar.shard.transformer.probe.capture import CallArguments
from patchpar.shard.transformer.replicate import attend_by_heads, own_of, with_all_tokens
from patchpar.shard.transformer.token_layout import Grids, TokenLayout
from patchpar.shard.transformer.token_mixing import ConvolutionCall, TokenMixing, is_sum
from patchpar.shard.transformer.token_mixing_ops import convolve_rows, sum_over_ranks
from patchpar.shard.transformer.token_plan import TokenPlan, TokenRows
from patchpar.shard.transformer.token_ranges import TokenRanges

HOOK = "patchpar_tokens"
_COMPILED = (
    "{} is compiled, and its tokens meet in sums or convolutions, or in parts that every rank computes with all of "
    "them, which cannot be exchanged inside a compiled block: leave it as it is, or use plan cfg=2 or data=N, which do "
    "not split the tokens"
)


class TransformerSharder:
    """A transformer whose tokens are split. Every rank passes and gets whole tensors.

    `ranges`: the token ranges of the last call, by list of blocks. `restore()` removes all hooks.
    """

    def __init__(self, denoiser: nn.Module, plan: TokenPlan, split: TokenSplit) -> None:
        self.denoiser, self.plan, self.split = denoiser, plan, split
        self.call: _TokenCall | None = None
        self.ranges: dict[str, TokenRanges] = {}
        self._grids: Grids = {}
        self._hooks = HookSet()
        for path, module in denoiser.named_modules():
            if path in plan.paths or (path and is_compiled(module)):
                self._hook(module, _BlockHook(self, path, module))
        parts = {f"{path}.{part.path}" for block in plan.blocks for path in block.paths for part in block.replicated}
        for path in sorted(parts):
            self._hook(denoiser.get_submodule(path), _PartHook(self, path))

    def _hook(self, module: Any, hook: "_BlockHook") -> None:
        self._hooks.install(module, hook, HOOK)
        if is_compiled(module):  # the hook runs before the compiled graph, though `module` still counts as compiled
            hook.compiled = module._compiled_call_impl
            self._hooks.replace(module, "_compiled_call_impl", module._call_impl)

    def denoise(self, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Run one denoiser call; `forward` is the denoiser's own. Raises UnsupportedModel, PlanError, ExchangeError."""
        arguments = CallArguments.of(self.denoiser, args, kwargs)
        self.call = _TokenCall(self.split, TokenLayout(self.split, arguments, self.plan.latent, self._grids))
        self.ranges = self.call.ranges
        try:
            with self.call:
                output = forward(*args, **kwargs)
            return self.call.all_whole(output)
        finally:
            self.call = None

    def begin(self) -> None:
        """Begin an image: the same number of tokens may lie in another grid."""
        self._grids.clear()

    def restore(self) -> None:
        """Remove every hook. Idempotent."""
        self._hooks.close()


class _BlockHook(ModelHook):  # type: ignore[misc]  # diffusers is not typed
    """Runs a block on our tokens and keeps them split for the next block."""

    def __init__(self, shard: TransformerSharder, path: str, module: nn.Module) -> None:
        super().__init__()
        self.shard, self.path = shard, path
        self.rules = ArgumentRules(shard.plan, path, module) if path in shard.plan.paths else None
        self.compiled: Callable[..., Any] | None = None

    def new_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Replaces the block's forward."""
        call, forward = self.shard.call, self.fn_ref.original_forward
        if self.compiled is not None:
            forward = partial(compiled_forward, module, self.compiled, forward)
        if call is None or call.inside:
            return forward(*args, **kwargs)
        call.inside = True  # otherwise reading the arguments would gather them
        try:
            if self.rules is not None:
                leaves, spec = tree_flatten((args, kwargs))
                rule = self.rules.find(leaves, spec, args, kwargs)
                if rule.plan is not None:
                    if self.compiled is not None and (rule.plan.mixing is not None or rule.plan.replicated):
                        raise UnsupportedModel(_COMPILED.format(self.path))
                    block = BlockCall(self.path, rule.plan)
                    args, kwargs = tree_unflatten(call.own_leaves(block, rule, leaves), spec)
                    return call.run(block, forward, args, kwargs)
            if self.compiled is not None:  # its functions cannot be intercepted
                args, kwargs = call.all_whole((args, kwargs))
                with answered_by(call.attend):
                    return forward(*args, **kwargs)
        finally:
            call.inside = False
        return forward(*args, **kwargs)


class _PartHook(ModelHook):  # type: ignore[misc]  # diffusers is not typed
    """Runs a part of a block with the tokens of all ranks, where the block's plan says so."""

    def __init__(self, shard: TransformerSharder, path: str) -> None:
        super().__init__()
        self.shard, self.path = shard, path
        self.compiled: Callable[..., Any] | None = None

    def new_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Replaces the part's forward."""
        call, forward = self.shard.call, self.fn_ref.original_forward
        block = None if call is None else call.block
        part = None if block is None else block.part_at(self.path)
        if call is None or block is None or part is None:
            return forward(*args, **kwargs)
        arguments = CallArguments.of(module, args, kwargs)
        whole = with_all_tokens(call.split, self.path, part, block.ranges, arguments)
        block.part = self.path
        try:
            return own_of(part, block.ranges, forward(*whole.args, **whole.kwargs))
        finally:
            block.part = None


class _TokenCall(TorchFunctionMode):
    """One denoiser call: intercepts every function outside the blocks, and attention inside them."""

    def __init__(self, split: TokenSplit, layout: TokenLayout) -> None:
        super().__init__()
        self.split, self.layout = split, layout
        self.ranges: dict[str, TokenRanges] = {}
        self.inside = False
        self.block: BlockCall | None = None
        self._local: Any = WeakTensorKeyDictionary()  # tensor -> LocalTokens
        self._cuts: Any = WeakTensorKeyDictionary()  # whole tensor -> {(rows, ranges, version): ours}

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if not self.inside:
            args, kwargs = self.all_whole((args, kwargs))
        elif torch.compiler.is_compiling():
            return traceable(func)(*args, **kwargs)
        elif func is F.scaled_dot_product_attention and self.block is not None:
            return self.attend(AttentionCall(*args, **kwargs))
        elif self.block is not None and self.block.plan.mixing is not None:
            return self._mixed(self.block, self.block.plan.mixing, func, args, kwargs)
        return func(*args, **kwargs)

    def _mixed(
        self, block: BlockCall, mixing: TokenMixing, func: Callable[..., Any], args: Sequence[Any], kwargs: Any
    ) -> Any:
        """Run any other function in a block whose tokens meet in sums or convolutions too."""
        if is_sum(func, args, kwargs):
            number, block.sums = block.sums, block.sums + 1
            found = func(*args, **kwargs)
            where = f"{block.path} sum {number}"
            return sum_over_ranks(self.split, where, found) if number in mixing.sums else found
        convolution = ConvolutionCall.of(func, args, kwargs)
        if convolution is None:
            return func(*args, **kwargs)
        number, block.convolutions = block.convolutions, block.convolutions + 1
        if number not in mixing.reaching(block.ranges.across):
            return func(*args, **kwargs)
        return convolve_rows(self.split, f"{block.path} convolution {number}", block.ranges, convolution)

    def attend(self, call: AttentionCall) -> Tensor:
        """Return the attention output [B, N, q, E] in the running block. Raises UnsupportedModel, ExchangeError."""
        block = self.block
        if block is None:  # the block is not split
            return call.run()
        if self.split.kernel is not None:
            call = replace(call, kernel=self.split.kernel)
        if block.part is not None:
            return as_torch_lays(attend_by_heads(self.split, f"{block.part} heads", call))
        number, block.attentions = block.attentions, block.attentions + 1
        if number >= len(block.plan.attentions):
            raise UnsupportedModel(
                f"{block.path} calls attention more than {number} times, which it did not when its tokens were searched"
            )
        where = f"{block.path} attention {number}"
        return as_torch_lays(attend_split(self.split, where, block.plan.attentions[number], block.ranges, call))

    def own_leaves(self, block: BlockCall, rule: ArgumentRule, leaves: list[Any]) -> list[Any]:
        """Return the arguments of the block for our tokens. Raises PlanError, UnsupportedModel."""
        block.ranges = self.ranges[block.plan.name] = self._ranges(block, rule, leaves)
        rows = dict(rule.inputs)
        own: list[Any] = [
            self._own(block.ranges, leaf, rows.get(number)) if isinstance(leaf, Tensor) else leaf
            for number, leaf in enumerate(leaves)
        ]
        for number in rule.counts:
            own[number] += block.ranges.count - block.ranges.num_tokens
        for number in rule.row_counts if block.ranges.across.rows is None else rule.frame_counts:
            own[number] = block.ranges.num_rows
        for number in rule.bounds:
            own[number] = block.ranges.before(own[number])
        return own

    def run(self, block: BlockCall, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run the block on our tokens; its outputs keep our tokens only."""
        self.block = block
        try:
            with answered_by(self.attend):
                output = forward(*args, **kwargs)
        finally:
            self.block = None
        for number, leaf in enumerate(tree_flatten(output)[0]):
            rows = block.plan.outputs.get(number)
            if rows is not None:
                self._local[leaf] = LocalTokens(rows, block)
        return output

    def _ranges(self, block: BlockCall, rule: ArgumentRule, leaves: list[Any]) -> TokenRanges:
        """Return the ranges of an argument that is cut already, else new ones. Raises PlanError, UnsupportedModel."""
        for number, _ in rule.inputs:
            if (local := self._local.get(leaves[number])) is not None:
                return local.ranges
        return self.layout.ranges(block.path, block.plan, rule, leaves)

    def _own(self, ranges: TokenRanges, x: Tensor, rows: TokenRows | None) -> Tensor:
        """Return an argument with our tokens only, if it has `rows` of tokens."""
        local = self._local.get(x)
        if local is not None:
            if local.whole is None and local.rows == rows and local.ranges == ranges:
                return x
            x = self.whole(x)
        return x if rows is None else self._cut(x, rows, ranges)

    def _cut(self, x: Tensor, rows: TokenRows, ranges: TokenRanges) -> Tensor:
        """Return a whole argument with our tokens only, and everything around the tokens."""
        if x.is_inference():  # it has no version counter that would show a change in place
            return rows.cut(x, ranges)
        known = self._cuts.setdefault(x, {})
        key = (rows, ranges, x._version)
        if key not in known:
            known.clear()
            known[key] = rows.cut(x, ranges)
        return known[key]

    def whole(self, x: Tensor) -> Tensor:
        """Return a tensor with the tokens of all ranks. Raises ExchangeError."""
        local = self._local.get(x)
        if local is None:
            return x
        if local.whole is None:
            start = local.rows.start(x.shape[local.rows.dim], local.ranges.count)
            local.whole = self.split.gather(x, local.rows.dim, start, local.ranges, f"after {local.where}")
        return local.whole

    def all_whole(self, value: Any) -> Any:
        """Return `value` with every tensor in it whole. Raises ExchangeError."""
        if not self._local:
            return value
        return tree_map(lambda leaf: self.whole(leaf) if isinstance(leaf, Tensor) else leaf, value)
