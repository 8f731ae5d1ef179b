"""Compiled blocks of a denoiser in bands: attention is one operator of their graphs, answered outside of these.

A block may hold attention layers, of the image and of text. Other exchange points cannot be in a compiled block.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn

from patchpar.errors import UnsupportedModel
from patchpar.shard.compiled import is_compiled
from patchpar.shard.compiled_op import attention_traced, compiled_forward
from patchpar.shard.hooks import HookSet
from patchpar.shard.local_patch import LocalPatch, PatchHook
from patchpar.shard.sdpa import AttentionCall
from patchpar.shard.unet.attention_hook import attend_over_bands
from patchpar.shard.unet.discover import ExchangeSites
from patchpar.shard.unet.ip_adapter_masks import takes_masks

WAY_OUT = "leave it uncompiled, or use plan cfg=2 or data=N, which do not split the image"


class CompiledBlocks:
    """The outermost compiled modules among `modules`, by path."""

    def __init__(self, modules: Mapping[str, Any]) -> None:
        compiled = [path for path, module in modules.items() if path and is_compiled(module)]
        self.paths = [path for path in compiled if not any(path.startswith(f"{other}.") for other in compiled)]

    def hold(self, path: str) -> bool:
        """Whether the module at `path` is in a compiled one, or is one."""
        return any(path == block or path.startswith(f"{block}.") for block in self.paths)

    def refuse_others(self, sites: ExchangeSites, modules: Mapping[str, nn.Module]) -> None:
        """Raise UnsupportedModel for exchange points in compiled modules other than calls of torch's attention."""
        norms = [site.path for site in sites.norms]
        convs = [site.path for site in sites.convs]
        masks = [path for path, module in modules.items() if takes_masks(module)]
        for path in (*norms, *convs, *sites.transforms, *sites.pools, *sites.own_kernel, *masks):
            if self.hold(path):
                raise UnsupportedModel(
                    f"{path} is in a compiled block and reads the whole image, but of compiled blocks only attention "
                    f"by torch's scaled_dot_product_attention is split: {WAY_OUT}"
                )

    def install(self, hooks: HookSet, modules: Mapping[str, Any], sites: ExchangeSites, patch: LocalPatch) -> None:
        """Hook the compiled modules; `hooks` removes that again."""
        for path in self.paths:
            module = modules[path]
            layers = [layer for layer in sites.calls if layer.startswith(f"{path}.") or layer == path]
            compiled = module._compiled_call_impl
            hooks.install(module, CompiledBlockHook(patch, path, layers, sites.attentions, compiled), "patchpar_block")
            hooks.replace(module, "_compiled_call_impl", module._call_impl)  # the hook runs before the compiled graph


class CompiledBlockHook(PatchHook):
    """Runs a compiled block and answers its calls of attention.

    `layers`: the layer of each call, in their order; `spatial`: layers over the tokens of the whole image.
    """

    def __init__(
        self,
        patch: LocalPatch,
        where: str,
        layers: Sequence[str],
        spatial: Sequence[str],
        compiled: Callable[..., Any],
    ) -> None:
        super().__init__(patch, where)
        self.compiled = compiled
        self._points = [layer if layer in spatial else None for layer in layers]
        self._number = 0

    def new_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Replaces the block's forward. Raises UnsupportedModel for attention that cannot be split."""
        self._number = 0
        forward = partial(compiled_forward, module, self.compiled, self.fn_ref.original_forward)
        with attention_traced(self._attend):
            output = forward(*args, **kwargs)
        self._refuse_unless(self._number == len(self._points))
        return output

    def _attend(self, call: AttentionCall) -> Tensor:
        number, self._number = self._number, self._number + 1
        self._refuse_unless(number < len(self._points))
        point = self._points[number]
        if point is None or not self.patch.active:
            return call.run()
        return attend_over_bands(self.patch, point, call)

    def _refuse_unless(self, as_found: bool) -> None:
        if not as_found:
            raise UnsupportedModel(
                f"{self.where} is compiled and calls attention another number of times than the {len(self._points)} "
                f"that were found; torch may have left it uncompiled, which its warnings say: {WAY_OUT}"
            )
