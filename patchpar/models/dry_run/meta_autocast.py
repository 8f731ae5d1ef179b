"""torch.autocast of the meta device, which torch does not know: nothing is cast there.

Code asks for it to leave a part of a network as it is, such as the angles of a rotary embedding in float32.
"""

from functools import wraps
from typing import Any

import torch

from patchpar.shard.torch_replacement import TorchReplacement


@wraps(torch.autocast.__init__)  # torch.compile asks for its arguments
def _made(self: torch.autocast, device_type: str, *args: Any, **kwargs: Any) -> None:
    if device_type == "meta":
        META_AUTOCAST.before(self, "cpu", enabled=False)
    else:
        META_AUTOCAST.before(self, device_type, *args, **kwargs)


META_AUTOCAST = TorchReplacement(torch.autocast, "__init__", _made)
