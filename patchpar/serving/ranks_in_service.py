"""Ranks that an administrator takes out of service, whose devices are then free for others, and puts back again."""

from patchpar.plan.plan import Plan
from patchpar.serving.generation import ImageGenerator
from patchpar.serving.job import Job
from patchpar.serving.request_error import RequestError


def check_removable(generator: ImageGenerator, rank: int) -> None:
    """Raise RequestError for a rank that cannot be removed: 404 if there is none in service, 409 if it is needed."""
    states, plan, left = generator.ranks.states, generator.served.plan, generator.ranks.in_service - 1
    if rank >= len(states) or states[rank] == "removed":
        raise _unknown(rank, "in service")
    reason = ""
    if left < 1:
        reason = "it is the last one in service: end the server instead"
    elif isinstance(plan, Plan) and (plan.world_size > left or plan.divides_weights):
        reason = f"the server's plan, {plan}, needs it: serve with --plan auto"
    elif not generator.pipe.can_release:
        reason = "ranks are started together here, and none can be ended alone: start the server with other --devices"
    if reason:
        raise RequestError(f"rank {rank}: {reason}", status=409, code="rank_needed", is_final=True)


def check_removed(generator: ImageGenerator, rank: int) -> None:
    """Raise RequestError, 404, for a rank that has not been removed."""
    states = generator.ranks.states
    if rank >= len(states) or states[rank] != "removed":
        raise _unknown(rank, "removed")


def remove_rank(generator: ImageGenerator, job: Job, rank: int) -> None:
    """Take a rank out of service and end its worker, while nothing else runs."""
    job.show(note=f"removing rank {rank}")
    check_removable(generator, rank)
    generator.ranks.remove(rank)
    generator.pipe.release(rank)


def put_back_rank(generator: ImageGenerator, job: Job, rank: int) -> None:
    """Start the worker of a removed rank, which loads the model, and put it into service. Raises what that raises."""
    job.show(note=f"starting rank {rank}")
    check_removed(generator, rank)
    generator.pipe.take_back(rank)
    try:
        generator.warm_up_on(job, "auto", [(rank,)])
    except BaseException:
        generator.pipe.release(rank)
        raise
    generator.ranks.put_back(rank)


def _unknown(rank: int, what: str) -> RequestError:
    return RequestError(f"there is no rank {rank} {what}", status=404, code="not_found")
