"""The token plan of a transformer: where its tokens are. Found once for a model, printable, run by `install`.

transformer_blocks, 19 x FluxTransformerBlock
  tokens lie in            the grid of image_rotary_emb[0]
  hidden_states            tokens along dim 1
  image_rotary_emb[0]      tokens along dim 0, last
  attention 0              keys exchanged, tokens along dim 2, last
  output 1                 tokens along dim 1
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from patchpar.errors import UnsupportedModel
from patchpar.shard.transformer.token_mixing import TokenMixing
from patchpar.shard.transformer.token_ranges import TokenGrid, TokenRanges


class NotWatched(UnsupportedModel):
    """A block is called with other arguments than in the search for tokens."""


@dataclass(frozen=True, slots=True)
class TokenRows:
    """A run of tokens along `dim`, after `before` rows that are not split and before `after` more.

    None: any number, since only the run's length is known. At most one of them is None.
    """

    dim: int
    before: int | None = 0
    after: int | None = 0

    @property
    def alone(self) -> bool:
        """Whether there is nothing else along the dim."""
        return self.before == 0 and self.after == 0

    @property
    def amid(self) -> bool:
        """Whether there is something on both sides."""
        return (self.before, self.after) != (0, None) and (self.before, self.after) != (None, 0) and not self.alone

    def start(self, size: int, tokens: int) -> int:
        """Return where the run of `tokens` tokens starts in `size` rows. Raises UnsupportedModel."""
        rest = size - tokens
        known = (self.before or 0) + (self.after or 0)
        if rest < known or (rest != known and self.before is not None and self.after is not None):
            raise UnsupportedModel(
                f"{size} rows do not hold {tokens} tokens {self}, as they did in the search for the model's tokens"
            )
        return self.before if self.before is not None else rest - (self.after or 0)

    def among(self, x: Tensor, tokens: int) -> Tensor:
        """Return the `tokens` tokens of a whole tensor of any shape, without the rows around them.

        Raises UnsupportedModel.
        """
        return x.narrow(self.dim, self.start(x.shape[self.dim], tokens), tokens)

    def cut(self, x: Tensor, ranges: TokenRanges) -> Tensor:
        """Return our tokens of a whole tensor of any shape, and the rows around all tokens.

        One row alone is that of all tokens, as where all have the same time, and stays. A copy unless it is a
        contiguous view. Raises UnsupportedModel.
        """
        size, tokens = x.shape[self.dim], ranges.num_tokens
        if size == 1 and self.alone:
            return x
        start = self.start(size, tokens)
        before, all_tokens, after = x.split_with_sizes((start, tokens, size - start - tokens), self.dim)
        own = ranges.own(all_tokens, self.dim)
        return own.contiguous() if self.alone else torch.cat([before, own, after], self.dim)

    def __str__(self) -> str:
        if self.alone:
            return f"along dim {self.dim}"
        if self.before is None:
            return f"along dim {self.dim}, last" + (f" but for {self.after}" if self.after else "")
        return f"along dim {self.dim}, " + (f"after {self.before} others" if self.before else "first")


@dataclass(frozen=True, slots=True)
class AttentionTokens:
    """One call of scaled_dot_product_attention in a block. None: no split token is among them.

    `mask_dims`: the number of dims of its mask in a whole call.
    """

    queries: TokenRows | None
    keys: TokenRows | None
    mask_dims: int | None = None

    def __str__(self) -> str:
        if self.keys is None:
            return "keys on every rank: nothing is exchanged"
        asked = "" if self.queries is not None else ", queries on every rank"
        return f"keys exchanged, tokens {self.keys}{asked}"


@dataclass(frozen=True, slots=True)
class Replicated:
    """A part of a block, at `path` in it, that mixes tokens in a way that cannot be split.

    Every rank computes it with all tokens: those of `inputs`, by the name of an argument, are gathered, and `outputs`,
    by number, are cut to ours.
    """

    path: str
    inputs: Mapping[str, TokenRows]
    outputs: Mapping[int, TokenRows]

    def __str__(self) -> str:
        listed = ", ".join(f"{name} {rows}" for name, rows in self.inputs.items())
        return f"computed by every rank with all tokens of {listed}"


@dataclass(frozen=True, slots=True, kw_only=True)
class GridSource:
    """The source of the grid that tokens lie in: the shape of the latent, or an argument of the block.

    `dims` of one sample, from its end, are frames, rows and columns, or the last of them, in this order; `patches` is
    the patch size along each. `table`: the argument with the positions of tokens, see `probe.grid.grid_of_table`.
    """

    dims: tuple[int, ...] = ()
    patches: tuple[int, ...] = ()
    table: str | None = None

    def grid(self, shape: tuple[int, ...]) -> TokenGrid | None:
        """Return the grid of a latent of that shape; None where it has none, or patches would be cut."""
        if not self.dims or len(shape) < -min(self.dims):
            return None
        sizes = [(shape[dim], patch) for dim, patch in zip(self.dims, self.patches, strict=True)]
        if any(size % patch for size, patch in sizes):
            return None
        *frames, rows, columns = (size // patch for size, patch in sizes)
        return TokenGrid(frames[0] if frames else 1, rows, columns)

    def __str__(self) -> str:
        if self.table is not None:
            return f"the grid of {self.table}"
        names = ("frames", "rows", "columns")[-len(self.dims) :]
        patch = " x ".join(map(str, self.patches))
        return f"{' x '.join(names)} = dims {', '.join(map(str, self.dims))} of the latent, {patch} to a token"


@dataclass(frozen=True, slots=True, kw_only=True)
class TextPlan:
    """A second run of tokens of the joint attention in a block, such as text, split between the ranks like the first.

    Entries as in BlockPlan, of these tokens, with one of `attentions` for each of the block's. The first of `inputs`
    gives their number: all its rows but those of the first run. `counts` may be among those of the block too.
    """

    inputs: Mapping[str, TokenRows]
    attentions: tuple[AttentionTokens, ...]
    outputs: Mapping[int, TokenRows]
    counts: tuple[str, ...] = ()

    def lines(self) -> list[str]:
        """Return its entries as text."""
        lines = [f"  {path:<32} text {rows}" for path, rows in self.inputs.items()]
        lines += [f"  {path:<32} the number of text tokens" for path in self.counts]
        lines += [f"  attention {number:<22} text: {call}" for number, call in enumerate(self.attentions)]
        return lines + [f"  output {number:<25} text {rows}" for number, rows in self.outputs.items()]


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockPlan:
    """The plan of the blocks at `paths`, which are of one list, one structure and one signature.

    `signature`: the name and type of each argument. `inputs` are keyed by the name of an argument, `outputs` by number.
    `counts`: arguments that hold the number of tokens, with or without other rows. `bounds`: arguments that hold the
    number of first tokens that the block computes differently, such as those of a given frame. `ratio`: tokens per
    element of one sample's latent, used where no argument consists of tokens alone. `origin`: the source of the tokens'
    grid; None where it is not known. `mixing`: where tokens meet outside attention; None where they do not.
    `replicated`: parts that are not split. `watched`: paths in the block of modules whose functions are intercepted,
    since they sum or convolve tokens (`mixing` counts calls in these modules), or have imported attention under another
    name than torch.nn.functional's; "" is the block itself. `text`: a second run of tokens that is split too.
    """

    name: str
    kind: str
    paths: tuple[str, ...]
    signature: tuple[str, ...]
    inputs: Mapping[str, TokenRows]
    counts: tuple[str, ...]
    attentions: tuple[AttentionTokens, ...]
    outputs: Mapping[int, TokenRows]
    ratio: float
    origin: GridSource | None = None
    mixing: TokenMixing | None = None
    bounds: tuple[str, ...] = ()
    replicated: tuple[Replicated, ...] = ()
    watched: tuple[str, ...] = ()
    text: TextPlan | None = None

    def __post_init__(self) -> None:
        """Raise ValueError where sums or convolutions would not be intercepted."""
        if self.mixing is not None and not self.watched:
            raise ValueError(f"{self.name} sums or convolves its tokens in no module")

    def __str__(self) -> str:
        lines = [f"{self.name}, {len(self.paths)} x {self.kind}"]
        lines += [f"  {'tokens lie in':<32} {self.origin or 'a row'}"]
        lines += [f"  {path:<32} tokens {rows}" for path, rows in self.inputs.items()]
        lines += [f"  {path:<32} their number" for path in self.counts]
        lines += [f"  {path:<32} how many of the first are treated otherwise" for path in self.bounds]
        lines += [f"  attention {number:<22} {call}" for number, call in enumerate(self.attentions)]
        if self.mixing is not None:
            lines += [f"  {path:<32} their number of rows" for path in self.mixing.row_counts]
            lines += [f"  {path:<32} their number of frames" for path in self.mixing.frame_counts]
            lines += [f"  sum {number:<28} over tokens" for number in self.mixing.sums]
            lines += [f"  convolution {number:<20} over rows of tokens" for number in self.mixing.convolutions]
            lines += [f"  convolution {number:<20} over frames" for number in self.mixing.frame_convolutions]
        lines += [f"  {path or 'the block':<32} its functions are intercepted" for path in self.watched]
        lines += [f"  {part.path:<32} {part}" for part in self.replicated]
        lines += [f"  output {number:<25} tokens {rows}" for number, rows in self.outputs.items()]
        lines += [] if self.text is None else self.text.lines()
        return "\n".join(lines)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenPlan:
    """The blocks that are split, and those that every rank runs whole, with the reason.

    `latent`: the name of the argument that is denoised. `others`: paths and signatures of blocks that are not split,
    since they cannot be or have no tokens.
    """

    denoiser: str
    latent: str
    blocks: tuple[BlockPlan, ...]
    whole: Mapping[str, str]
    others: frozenset[tuple[str, tuple[str, ...]]] = frozenset()

    @property
    def paths(self) -> frozenset[str]:
        """The paths of the blocks that are split."""
        return frozenset(path for each in self.blocks for path in each.paths)

    @property
    def attentions(self) -> tuple[str, ...]:
        """A name for each attention to split keys, in all blocks: those that a call runs, by one signature of each."""
        known = {path: each.attentions for each in self.blocks for path in each.paths}
        return tuple(
            f"{path} {number}" for path, calls in known.items() for number, call in enumerate(calls) if call.keys
        )

    def joined(self, other: "TokenPlan") -> "TokenPlan":
        """Return this plan together with one for calls with other arguments."""
        new = tuple(block for block in other.blocks if block not in self.blocks)
        return replace(
            self, blocks=self.blocks + new, whole={**self.whole, **other.whole}, others=self.others | other.others
        )

    def knows(self, paths: Sequence[str], signature: tuple[str, ...]) -> bool:
        """Whether it covers blocks at these paths with this signature, also as not to be split."""
        split = {path for each in self.blocks if each.signature == signature for path in each.paths}
        return all(path in split or (path, signature) in self.others for path in paths)

    def find(self, path: str, signature: tuple[str, ...]) -> BlockPlan | None:
        """Return the plan of a block with this signature; None where it is left whole. Raises NotWatched."""
        if (path, signature) in self.others:
            return None
        for each in self.blocks:
            if path in each.paths and each.signature == signature:
                return each
        known = {entry for each in self.blocks if path in each.paths for entry in each.signature}
        raise NotWatched(
            f"{path} was watched with other arguments than it is called with now, the difference being "
            f"{', '.join(sorted(known ^ set(signature)))}: its tokens must be searched again for such calls"
        )

    def __str__(self) -> str:
        left = [f"{name}: every rank has all of it, since {reason}" for name, reason in self.whole.items()]
        return "\n".join([f"{self.denoiser}, {len(self.paths)} blocks split by tokens", *map(str, self.blocks), *left])
