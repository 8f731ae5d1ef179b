"""Which node has which rank: as many neighbours as possible on the same one, since bands exchange with neighbours."""

from collections import Counter
from collections.abc import Mapping

from patchpar.errors import LaunchError


def bundles_by_rank(nodes: Mapping[int, str]) -> tuple[int, ...]:
    """Return the bundle of each rank. `nodes`: of each bundle.

    Ranks of a node follow each other, those of the node with the most bundles first: the innermost axis of a plan,
    `patch`, and images on fewer ranks than there are stay on as few nodes as possible.
    """
    sizes = Counter(nodes.values())
    return tuple(sorted(nodes, key=lambda bundle: (-sizes[nodes[bundle]], nodes[bundle], bundle)))


def check_resources(number: int, resource: str, total: float, num_nodes: int) -> None:
    """Raise LaunchError if a cluster cannot have so many ranks. `total`: of the resource, one for each rank."""
    if number <= total:
        return
    nodes = f"{num_nodes} node{'s' * (num_nodes != 1)}"
    way_out = f"use at most 'ray:{int(total)}', or add nodes" if total >= 1 else "add nodes"
    raise LaunchError(
        f"devices='ray:{number}': the Ray cluster has {total:g} {resource}s on {nodes}, and each rank takes one: "
        f"{way_out}"
    )
