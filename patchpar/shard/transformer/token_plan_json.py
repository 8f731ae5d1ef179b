"""A token plan as JSON, for the cache, the package and the other ranks."""

import json
from dataclasses import asdict

from patchpar.plan.dataclass_json import decoded
from patchpar.plan.json_files import object_of
from patchpar.shard.transformer.token_plan import TokenPlan


def to_json(plan: TokenPlan) -> str:
    """Return the plan as text, the same for equal plans."""
    raw = asdict(plan)
    for block in raw["blocks"]:
        for name in ("mixing", "text"):
            if block[name] is None:  # in most plans only attention mixes tokens
                del block[name]
        for name in ("bounds", "replicated", "watched"):
            if not block[name]:
                del block[name]
    return json.dumps(raw, indent=1, default=sorted)


def from_json(text: str) -> TokenPlan:
    """Parse the text of `to_json`. Raises ValueError, KeyError or TypeError for anything else."""
    return decoded(TokenPlan, object_of(text, "a token plan"))
