"""The actor of one rank. Imported on its node, by Ray."""

import ray

from patchpar.launch.network.remote_rank import RemoteRank


class RayRank(RemoteRank):
    """One rank in an actor: `prepare`, then `serve`, which lasts as long as the actor."""

    def __init__(self) -> None:
        super().__init__(ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address())
