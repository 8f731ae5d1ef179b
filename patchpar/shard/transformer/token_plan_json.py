"""A token plan as text, to be kept, shipped, or told to other ranks."""

import json
from dataclasses import asdict

from patchpar.plan.dataclass_json import decoded
from patchpar.plan.json_files import object_of
from patchpar.shard.transformer.token_plan import TokenPlan


def to_json(plan: TokenPlan) -> str:
    """The same text for the same plan, wherever it was found."""
    raw = asdict(plan)
    for block in raw["blocks"]:
        if block["mixing"] is None:  # in most plans tokens meet in attention alone
            del block["mixing"]
        for name in ("bounds", "replicated"):
            if not block[name]:
                del block[name]
    return json.dumps(raw, indent=1, default=sorted)


def from_json(text: str) -> TokenPlan:
    """The plan that was written. Raises ValueError, KeyError or TypeError for anything else."""
    return decoded(TokenPlan, object_of(text, "a token plan"))
