"""On the path of ranks that share a GPU and use NCCL, which refuses that on one host: each process is one of its own.

They then exchange through sockets, and their kernels take turns on the GPU.
"""

import os

os.environ["NCCL_HOSTID"] = f"process {os.getpid()}"
