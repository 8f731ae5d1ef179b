"""A call of a split transformer that holds foreign code, and what runs it plainly for a comparison."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

from torch import nn

from patchpar.comm.pytree import with_own_lists
from patchpar.shard.foreign.cuts import Cut, token_cuts
from patchpar.shard.foreign.guarded_call import GuardedCall
from patchpar.shard.step_caches import cache_of, caches_set_aside
from patchpar.shard.transformer.attention_backend import BackendKernel, needing_torch_attention
from patchpar.shard.transformer.install import TransformerSharder
from patchpar.shard.transformer.probe.capture import CallArguments
from patchpar.shard.transformer.probe.smaller_call import smaller_calls
from patchpar.shard.transformer.verify import shaken_call
from patchpar.shard.verification import Call, Forward


class TokenComparison(NamedTuple):
    """Runs a call of `network` plainly, or with fresh keys by `exactly`; `forward` is the network's own.

    `remembers`: the call itself may use values of earlier steps. `shard`: what divides its tokens.
    """

    network: nn.Module
    kernel: BackendKernel | None
    forward: Forward
    exactly: Forward
    call: Call
    remembers: bool
    shard: Callable[[], TransformerSharder | None]

    def of(self, split: Callable[[], Any], ranks: int, form: Any) -> GuardedCall:
        """Return the call of that form that `split` runs on so many ranks."""
        kept = self._replace(call=with_own_lists(self.call))
        again = self.remembers or cache_of(self.network) is not None
        return GuardedCall(
            form=form,
            split=split,
            plain=partial(kept._compared, self.forward),
            cuts=self._cuts,
            exactly=partial(kept._compared, partial(self.exactly, self.forward)) if again else None,
            what=f"{type(self.network).__name__} with its tokens split between {ranks} ranks",
            shaken=kept._shaken,
            smaller=partial(kept._smaller, ranks, form),
            mixed="tokens",
            way_out="use plan cfg=2 or data=N, which do not split the tokens",
        )

    def _smaller(self, ranks: int, form: Any) -> Iterator[GuardedCall]:
        """Yield such calls with fewer tokens."""
        shard = self.shard()
        assert shard is not None, "the call has been split"
        for each in smaller_calls(CallArguments.of(self.network, *self.call), shard.plan.latent):
            smaller = self._replace(call=(each.args, each.kwargs))
            yield smaller.of(partial(smaller._split, shard), ranks, form)

    def _split(self, shard: TransformerSharder) -> Any:
        with shard.aside():
            return self._compared(partial(self.exactly, self.forward))

    def _shaken(self, seed: int) -> Any:
        """Return the plain output for a latent that is changed by as much as rounding changes it."""
        shard = self.shard()
        assert shard is not None, "the call has been split"
        args, kwargs = with_own_lists(self.call)
        arguments = shaken_call(CallArguments.of(self.network, args, kwargs), shard.plan.latent, seed)
        with caches_set_aside(self.network), needing_torch_attention(self.network, self.kernel):
            return arguments.passed_to(self.forward)

    def _compared(self, forward: Forward) -> Any:
        """Return the output of a forward, in which no cache skips blocks."""
        args, kwargs = with_own_lists(self.call)
        with caches_set_aside(self.network), needing_torch_attention(self.network, self.kernel):
            return forward(*args, **kwargs)

    def _cuts(self) -> list[Cut]:
        shard = self.shard()
        return token_cuts([] if shard is None else shard.ranges.values())
