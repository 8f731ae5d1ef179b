"""What plans of other libraries are called here, for messages about names that a plan does not have."""

PLANS = {
    "ulysses": "patch=N,strategy=exact:ulysses=N",
    "ring": "patch=N,strategy=exact:attention=ring",
    "sequence": "patch=N",
    "context": "patch=N",
    "sp": "patch=N",
    "cp": "patch=N",
    "distrifusion": "patch=N,strategy=displaced:preset=paper",
    "pipefusion": "stage=N,strategy=piped",
    "pipeline": "stage=N",
    "pp": "stage=N",
    "tp": "tensor=N",
    "dp": "data=N",
    "fsdp": "patch=N,weights=sharded",
    **{axis: f"{axis}=N" for axis in ("data", "cfg", "tensor")},
}
"""By name, without what `advice` takes off it. docs/comparison.md has the flags of each library."""


def advice(name: str) -> str:
    """Return the end of a message: what a name such as "ulysses_degree" is called here, or nothing."""
    known = name.lower().replace("-", "_").removeprefix("use_")
    for ending in ("_degree", "_size", "_parallel", "_parallelism"):
        known = known.removesuffix(ending)
    return f"; what other libraries call {name} is {PLANS[known]} here" if known in PLANS else ""
