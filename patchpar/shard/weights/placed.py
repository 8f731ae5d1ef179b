"""A block's parameters where they lie, and a quick look whether they are there: twice whenever a block runs."""

from collections.abc import Sequence
from operator import attrgetter

from torch import Tensor

from patchpar.shard.weights.packed import PackedBlock

dtype_of = attrgetter("dtype")  # as `Tensor.data_ptr`, it is called for all tensors without a call of Python


class PlacedBlock:
    """A block whose parameters use the memory of `views`, tensors like them, once they are `put` there."""

    def __init__(self, block: PackedBlock, views: Sequence[Tensor]) -> None:
        self._block, self.views = block, views
        self._tensors = [each.tensor for each in block.tensors]
        self._addresses, self._dtypes = [*map(Tensor.data_ptr, views)], [*map(dtype_of, views)]
        self._has_memory = not any(view.is_meta for view in views)

    def put(self) -> None:
        """Make the parameters use it, unless they do: layerwise casting, for one, gives them other memory."""
        tensors = self._tensors
        addresses, dtypes = [*map(Tensor.data_ptr, tensors)], [*map(dtype_of, tensors)]
        if addresses != self._addresses or dtypes != self._dtypes or not self._has_memory:
            self._block.point_to(self.views)
