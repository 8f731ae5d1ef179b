"""Run a token plan: hooks on the blocks split the tokens between ranks from the first block to the last.

    at a block's entry     whole arguments are cut to our tokens; outputs of a block before are cut already
    in the block           attention with the keys of all ranks: `attention`; sums and convolutions: `token_mixing_ops`
    after it               our tokens only, until a function outside the blocks mixes tokens: then a gather

So nothing is gathered between blocks that pass tokens on, and everything the model computes between blocks is exact.

A compiled block is cut and joined outside the compiled graph, in which attention is one operator: the graph stays
whole. A compiled block that is not split gets whole tensors.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from diffusers.hooks import ModelHook
from torch import nn

from patchpar.errors import UnsupportedModel
from patchpar.shard.compiled import is_compiled
from patchpar.shard.compiled_op import attention_traced, compiled_forward
from patchpar.shard.hooks import HookSet
from patchpar.shard.module_tree import named_modules_of
from patchpar.shard.processor_call import ProcessorCall, looks_up_signatures
from patchpar.shard.sdpa import AttentionDispatched
from patchpar.shard.transformer.attention import TokenSplit
from patchpar.shard.transformer.block_arguments import ArgumentRules, leaves_and_form, with_leaves
from patchpar.shard.transformer.block_call import BlockCall, KnownRuns
from patchpar.shard.transformer.known_arguments import KnownArguments
from patchpar.shard.transformer.local_tokens import all_whole
from patchpar.shard.transformer.probe.capture import CallArguments
from patchpar.shard.transformer.replicate import own_of, with_all_tokens
from patchpar.shard.transformer.token_call import TokenCall
from patchpar.shard.transformer.token_layout import Grids, TokenLayout
from patchpar.shard.transformer.token_plan import TokenPlan
from patchpar.shard.transformer.token_ranges import TokenRanges

HOOK, WATCHED, ATTENTION = "patchpar_tokens", "patchpar_functions", "patchpar_attention"
_COMPILED = (
    "{} is compiled, and its tokens meet in sums or convolutions, or in parts that every rank computes with all of "
    "them, which cannot be exchanged inside a compiled block: leave it as it is, or use plan cfg=2 or data=N, which do "
    "not split the tokens"
)


class TransformerSharder:
    """A transformer whose tokens are split. Every rank passes and gets whole tensors.

    `ranges`: the token ranges of the last call, by list of blocks; `grids`: those found so far for the image.
    `restore()` removes all hooks.
    """

    def __init__(self, denoiser: nn.Module, plan: TokenPlan, split: TokenSplit) -> None:
        self.denoiser, self.plan, self.split = denoiser, plan, split
        self.call: TokenCall | None = None
        self.ranges: dict[str, TokenRanges] = {}
        self.grids: Grids = {}
        self._runs = KnownRuns()
        self._hooks = HookSet()
        try:
            self._hook_all()
        except BaseException:
            self.restore()  # a denoiser whose parts are others than those of the plan is left as it was
            raise

    def _hook_all(self) -> None:
        denoiser, plan = self.denoiser, self.plan
        blocks = plan.paths | {path for path, _ in plan.others}
        compiled: tuple[str, ...] = ()
        for path, module in named_modules_of(denoiser):
            if path and is_compiled(module):
                compiled = (*compiled, f"{path}.")
            if path in blocks or (path and is_compiled(module)):
                self._hook(module, _BlockHook(self, path, module))
            elif looks_up_signatures(module) and not path.startswith(compiled):
                self._hooks.install(module, _AttentionHook(self, path), ATTENTION)
        self._has_compiled = bool(compiled)
        parts = {f"{path}.{part.path}" for block in plan.blocks for path in block.paths for part in block.replicated}
        for path in sorted(parts):
            self._hook(denoiser.get_submodule(path), _PartHook(self, path))
        watched = {f"{path}.{part}" for block in plan.blocks for path in block.paths for part in block.watched if part}
        for path in sorted(watched):
            self._hooks.install(denoiser.get_submodule(path), _WatchedHook(self, path), WATCHED)

    def _hook(self, module: Any, hook: "_ShardHook") -> None:
        self._hooks.install(module, hook, HOOK)
        if is_compiled(module):  # the hook runs before the compiled graph, though `module` still counts as compiled
            hook.compiled = module._compiled_call_impl
            self._hooks.replace(module, "_compiled_call_impl", module._call_impl)

    def denoise(self, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Run one denoiser call; `forward` is the denoiser's own. Raises UnsupportedModel, PlanError, ExchangeError."""
        arguments = CallArguments.of(self.denoiser, args, kwargs)
        layout = TokenLayout(self.split, arguments, self.plan.latent, self.grids)
        self.call = TokenCall(self.split, layout, self._runs)
        self.ranges = self.call.ranges
        try:
            if self._has_compiled:  # a graph of torch.compile holds as long as torch's functions are the same
                return all_whole(forward(*args, **kwargs))
            with AttentionDispatched():
                return all_whole(forward(*args, **kwargs))
        finally:
            self.call.end()
            self.call = None

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Context of calls for their own sake: what is known of those of the image is put back."""
        kept = self.ranges, self.grids, self._runs
        self.grids, self._runs = {}, KnownRuns()
        try:
            yield
        finally:
            self.ranges, self.grids, self._runs = kept

    def begin(self) -> None:
        """Begin an image: the same number of tokens may lie in another grid."""
        self.grids.clear()
        self._runs.clear()

    def restore(self) -> None:
        """Remove every hook. Idempotent."""
        self._hooks.close()


class _ShardHook(ModelHook):  # type: ignore[misc]  # diffusers is not typed
    """A hook of the module at `path`. `compiled`: the graph of a compiled one."""

    def __init__(self, shard: TransformerSharder, path: str) -> None:
        super().__init__()
        self.shard, self.path = shard, path
        self.compiled: Callable[..., Any] | None = None


class _BlockHook(_ShardHook):
    """Runs a block on our tokens and keeps them split for the next block; one that is not split, on whole tensors."""

    def __init__(self, shard: TransformerSharder, path: str, module: nn.Module) -> None:
        super().__init__(shard, path)
        self.rules = ArgumentRules(shard.plan, path, module) if path in shard.plan.paths else None
        self._known: KnownArguments | None = None  # of the last call

    def new_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Replaces the block's forward."""
        call, forward = self.shard.call, self.fn_ref.original_forward
        if self.compiled is not None:
            forward = partial(compiled_forward, module, self.compiled, forward)
        if call is None:
            return forward(*args, **kwargs)
        if not call.inside and self.rules is not None:
            block, args, kwargs = self._begun(call, self.rules, args, kwargs)
            if block is not None:
                if self.compiled is not None and (block.plan.mixing is not None or block.plan.replicated):
                    raise UnsupportedModel(_COMPILED.format(self.path))
                return call.run(block, forward, args, kwargs, traced=self.compiled is not None)
        args, kwargs = all_whole((args, kwargs))  # once, rather than queries, keys and values
        if self.compiled is None:
            return forward(*args, **kwargs)
        with attention_traced(call.attend):
            return forward(*args, **kwargs)

    def _begun(
        self, call: TokenCall, rules: ArgumentRules, args: Any, kwargs: Any
    ) -> tuple[BlockCall | None, Any, Any]:
        """Return the begun call of the block, and its arguments for our tokens; None where it is not split."""
        known, splits_text = self._known, call.split.text
        if known is not None and not args and known.splits_text == splits_text:
            own = known.own(kwargs, call.cut, call.items)
            if own is not None:
                return call.begin_block(self.path, known.found), args, own
        leaves, form = leaves_and_form((args, kwargs))
        rule = rules.find(form, args, kwargs)
        if rule.plan is None:
            return None, args, kwargs
        block, own_leaves = call.begin(self.path, rule.plan, rule, leaves)
        self._known = KnownArguments.of(block.runs, leaves, args, kwargs, splits_text=splits_text)
        return block, *with_leaves(form, own_leaves)


class _AttentionHook(_ShardHook):
    """Runs an attention layer without the look-up of a signature, see `processor_call`."""

    def __init__(self, shard: TransformerSharder, path: str) -> None:
        super().__init__(shard, path)
        self._call = ProcessorCall()

    def new_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Replaces the layer's forward."""
        forward = self.fn_ref.original_forward
        if self.shard.call is None:
            return forward(*args, **kwargs)
        return self._call.run(module, forward, args, kwargs)


class _PartHook(_ShardHook):
    """Runs a part of a block with the tokens of all ranks, where the block's plan says so."""

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


class _WatchedHook(_ShardHook):
    """Intercepts the functions of a module of a block, where the block's plan says so."""

    def new_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Replaces the module's forward."""
        call, forward = self.shard.call, self.fn_ref.original_forward
        if call is None:
            return forward(*args, **kwargs)
        with call.watched(self.path):
            return forward(*args, **kwargs)
