"""One denoiser call of a transformer whose tokens are split: what its blocks get, and what attention is in them.

Outputs of a block are `LocalTokens`: the next block takes them as they are, any other reader gathers them.
"""

import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from patchpar.errors import UnsupportedModel
from patchpar.shard.attention.attention_memory import AttentionMemory, reuses_buffers
from patchpar.shard.compiled_op import attention_traced
from patchpar.shard.sdpa import TORCHS, AttentionCall, answered_by, as_torch_lays, with_attention
from patchpar.shard.transformer.attention import TokenSplit, attend_split
from patchpar.shard.transformer.block_arguments import ArgumentRule, leaves_and_form, with_leaves
from patchpar.shard.transformer.block_call import BlockCall, BlockRuns, KnownRuns
from patchpar.shard.transformer.known_arguments import CutItems
from patchpar.shard.transformer.local_tokens import LocalTokens, TokenSource, local_tokens
from patchpar.shard.transformer.replicate import attend_by_heads
from patchpar.shard.transformer.split_tokens import SplitTokens
from patchpar.shard.transformer.token_layout import TokenLayout
from patchpar.shard.transformer.token_mixing import ConvolutionCall, TokenMixing, is_sum
from patchpar.shard.transformer.token_mixing_ops import convolve_rows, sum_over_ranks
from patchpar.shard.transformer.token_plan import BlockPlan
from patchpar.shard.transformer.token_ranges import TokenRanges
from patchpar.shard.transformer.token_runs import Runs, cut_runs


class TokenCall:
    """One denoiser call. `ranges`: the token ranges by list of blocks; `block`: the running one, if it is split.

    `runs`: where tokens are in blocks that have been called so far, also in other calls.
    """

    def __init__(self, split: TokenSplit, layout: TokenLayout, runs: KnownRuns) -> None:
        self.split, self.layout, self.runs = split, layout, runs
        self.ranges: dict[str, TokenRanges] = {}
        self.inside = False
        self.block: BlockCall | None = None
        self._over = False
        keeps = split.kernel is not None or torch.is_grad_enabled()  # it may: what it has been given must stay
        self._memory = None if keeps or not reuses_buffers((split.comm, split.axis)) else AttentionMemory()
        self._cuts: dict[int, _CutArgument] = {}  # by the id of the whole tensor
        self.items = CutItems()

    def end(self) -> None:
        """End the call: tensors that the model has kept cannot be gathered any more."""
        self._over = True
        self._cuts.clear()
        self.items.clear()
        self._memory = None

    def attend(self, call: AttentionCall) -> Tensor:
        """Return the attention output [B, N, q, E] in the running block. Raises UnsupportedModel, ExchangeError."""
        block = self.block
        if block is None:  # the block is not split
            return call.run()
        if self.split.kernel is not None:
            call = call._replace(kernel=self.split.kernel)
        if block.part is not None:
            return as_torch_lays(attend_by_heads(self.split, f"{block.part} heads", call))
        number, block.attentions = block.attentions, block.attentions + 1
        if number >= len(block.plan.attentions):
            raise UnsupportedModel(
                f"{block.path} calls attention more than {number} times, which it did not when its tokens were searched"
            )
        where = f"{block.path} attention {number}"
        out = as_torch_lays(attend_split(self.split, where, block.runs.attentions[number], call, self._memory))
        if self._memory is not None:
            self._memory.release()
        return out

    def mix(self, block: BlockCall, func: Callable[..., Any], args: Sequence[Any], kwargs: Any) -> Any:
        """Run another function than attention in a module of the block that is watched."""
        mixing = block.plan.mixing or TokenMixing()
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

    def begin_block(self, path: str, found: BlockRuns) -> BlockCall:
        """Begin the block at `path` with tokens that lie so."""
        self.ranges[found.plan.name] = found.ranges
        if found.text is not None:
            self.ranges[found.text_name] = found.text
        return BlockCall(path, found)

    def begin(self, path: str, plan: BlockPlan, rule: ArgumentRule, leaves: list[Any]) -> tuple[BlockCall, list[Any]]:
        """Begin a block of this plan; return its arguments for our tokens too. Raises PlanError, UnsupportedModel."""
        ranges = self._ranges(path, plan, rule, leaves)
        text = self._text_ranges(rule, leaves, ranges) if rule.text else None
        block = self.begin_block(path, self.runs.of(plan, rule, ranges, text))
        runs, own = block.runs.inputs, list(leaves)
        for number, leaf in enumerate(leaves):
            wanted = runs.get(number, ())
            if isinstance(leaf, LocalTokens):
                is_as_wanted = leaf.gathered is None and leaf.source.runs is wanted  # nearly always
                own[number] = leaf.own if is_as_wanted else self._own(leaf, wanted)
            elif wanted and isinstance(leaf, Tensor):
                own[number] = self.cut(leaf, wanted)
        if rule.has_numbers:
            self._change_numbers(block, rule, own)
        return block, own

    def _change_numbers(self, block: BlockCall, rule: ArgumentRule, own: list[Any]) -> None:
        """Make numbers of tokens among the arguments those of our tokens."""
        for number in rule.counts:
            own[number] += block.ranges.count - block.ranges.num_tokens
        if block.text is not None:
            for number in rule.text_counts:
                own[number] += block.text.count - block.text.num_tokens
        for number in rule.row_counts if block.ranges.across.rows is None else rule.frame_counts:
            own[number] = block.ranges.num_rows
        for number in rule.bounds:
            own[number] = block.ranges.before(own[number])

    def run(self, block: BlockCall, forward: Callable[..., Any], args: Any, kwargs: Any, *, traced: bool) -> Any:
        """Run the block on our tokens, which are all that its outputs have. `traced`: it is compiled."""
        self.block, self.inside = block, True
        try:
            if traced or block.plan.watched:
                output = self._intercepted(block, forward, args, kwargs, traced=traced)
            else:
                output = with_attention(self.attend, forward, args, kwargs)
        finally:
            self.block, self.inside = None, False
        if type(output) is tuple:  # of tensors, as nearly always: its leaves are its items
            for x in output:
                if type(x) is not Tensor:
                    break
            else:
                return tuple(self._with_sources(block, list(output)))
        leaves, form = leaves_and_form(output)
        return with_leaves(form, self._with_sources(block, leaves))

    def _with_sources(self, block: BlockCall, leaves: list[Any]) -> list[Any]:
        """Make local tokens of the outputs of a block that are tokens, and return all of its outputs."""
        for number, runs in block.runs.outputs.items():
            leaves[number] = local_tokens(leaves[number], TokenSource(runs, block.path, self._gathered))
        return leaves

    def _intercepted(
        self, block: BlockCall, forward: Callable[..., Any], args: Any, kwargs: Any, *, traced: bool
    ) -> Any:
        if not traced and not block.watches(block.path):
            return with_attention(self.attend, forward, args, kwargs)
        with attention_traced(self.attend) if traced else _WatchedFunctions(self, block):
            return forward(*args, **kwargs)

    def watched(self, path: str) -> AbstractContextManager[Any]:
        """Context for the module at `path`: its functions are intercepted where the running block's plan says so."""
        block = self.block
        return _WatchedFunctions(self, block) if block is not None and block.watches(path) else nullcontext()

    def _ranges(self, path: str, plan: BlockPlan, rule: ArgumentRule, leaves: list[Any]) -> TokenRanges:
        """Return the ranges of an argument that is cut already, else new ones. Raises PlanError, UnsupportedModel."""
        for number, rows in rule.inputs:
            if isinstance(leaves[number], LocalTokens) and leaves[number].source.runs[0].rows == rows:
                return leaves[number].source.runs[0].ranges
        return self.layout.ranges(path, plan, rule, leaves)

    def _text_ranges(self, rule: ArgumentRule, leaves: list[Any], first: TokenRanges) -> TokenRanges | None:
        """Return the ranges of a second run of tokens, beside the `first`: those of an argument that is cut already."""
        number, rows = rule.text[0]
        x = leaves[number]
        if isinstance(x, LocalTokens):
            for run in x.source.runs:
                if run.rows == rows:
                    return run.ranges
        return self.layout.text_ranges(rule, leaves, first.num_tokens)

    def _own(self, x: LocalTokens, runs: Runs) -> Tensor:
        """Return an output of another block with our tokens only of the `runs` in it."""
        if x.gathered is None and x.source.runs == runs:
            return x.own
        return self.cut(x.whole(), runs) if runs else x.whole()

    def cut(self, x: Tensor, runs: Runs) -> Tensor:
        """Return a whole argument, of any shape, with our tokens only, and everything around the tokens."""
        if x.is_inference():  # it has no version counter that would show a change in place
            return cut_runs(x, runs)
        known = self._cuts.get(id(x))
        if known is not None and known.whole() is x and known.version == x._version and known.runs == runs:
            return known.own
        found = self._cuts[id(x)] = _CutArgument(x, runs)
        return found.own

    def _gathered(self, own: Tensor, source: TokenSource) -> Tensor:
        """Return a tensor with the tokens of all ranks. Raises UnsupportedModel, ExchangeError."""
        if self._over:
            raise UnsupportedModel(
                f"an output of {source.where} was kept beyond the denoiser's call, and has this rank's tokens only: "
                "use plan cfg=2 or data=N, which do not split the tokens"
            )
        placed = SplitTokens.of(own.shape[source.dim], source.runs)
        return self.split.gather(own, source.dim, placed, f"after {source.where}")


class _CutArgument:
    """Our tokens `own` of a `whole` argument of several blocks, of use while that is the same and of the same version.

    `runs`: how it was cut.
    """

    def __init__(self, x: Tensor, runs: Runs) -> None:
        self.whole, self.version, self.runs = weakref.ref(x), x._version, runs
        self.own = cut_runs(x, runs)


class _WatchedFunctions(TorchFunctionMode):
    """Mode around a module of a block that sums or convolves tokens, or calls attention by another name."""

    def __init__(self, call: TokenCall, block: BlockCall) -> None:
        super().__init__()
        self._call, self._block = call, block
        self._unanswered = answered_by(None)  # attention comes here

    def __enter__(self) -> Any:
        self._unanswered.__enter__()
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        self._unanswered.__exit__(*exception)

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_dynamo_compiling():
            return func(*args, **kwargs)
        if func is TORCHS:
            return self._call.attend(AttentionCall(*args, **kwargs))
        return self._call.mix(self._block, func, args, kwargs)
