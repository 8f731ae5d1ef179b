"""The exception for the caller after a failed request, and which of its workers can be used again."""

import time
from collections.abc import Mapping, Sequence

from patchpar.errors import CallCancelled, WorkerDied, WorkerHung
from patchpar.launch.channel import SEND_TIMEOUT
from patchpar.launch.hang_detection import HangLimits
from patchpar.launch.rank_process import RankProcess
from patchpar.launch.remote_errors import RemoteError
from patchpar.launch.request_loop import RequestOutcome

STACK_SECONDS = 0.3  # for a hung worker to print its stack
NEXT = "the next call starts a new one."


def error_of(outcome: RequestOutcome, workers: Mapping[int, RankProcess], limits: HangLimits) -> Exception | None:
    """Return the exception for the caller; None if every rank has returned a result. `workers`: by rank.

    Causes come before consequences: a dead worker, or one whose device has failed; what the caller's function raised;
    that it was cancelled; an exception of the engine; a hung rank; a lost connection.
    """
    broken = [rank for rank, failure in outcome.failures.items() if failure.broken_device]
    if outcome.died or broken:
        return _died(outcome, workers) if outcome.died else _without_device(workers[broken[0]], outcome)
    if outcome.not_reading:
        worker = workers[outcome.not_reading[0]]
        text = f"{worker} has not read its messages for {SEND_TIMEOUT:g} s; {worker.last_exchange_point()}."
        return WorkerHung(text, rank=worker.rank)
    if outcome.aborted is not None or (outcome.held and (outcome.failures or outcome.results)):
        return outcome.aborted or CallCancelled("this call was cancelled")
    own = {rank: failure for rank, failure in outcome.failures.items() if not failure.transport}
    if own:
        return _raised(own, outcome, workers)
    left = [worker for rank, worker in workers.items() if not outcome.is_over(rank)]
    if left:
        return _hung(outcome, left, workers, limits)
    return _raised(outcome.failures, outcome, workers) if outcome.failures else None


def is_in_step(outcome: RequestOutcome, ranks: Sequence[int]) -> bool:
    """Return whether the ranks can take another call as they are: all have answered, and no message is pending.

    The latter is known from heartbeats: ranks that failed at the same point have passed equally many exchange points.
    Nor may one that has failed have done half of what it was asked for.
    """
    answered = all(rank in outcome.results or rank in outcome.failures for rank in ranks)
    if outcome.died or outcome.not_reading or not answered:
        return False
    if not outcome.failures:
        return True
    in_step = len({count for rank, count in outcome.beats.items() if rank not in outcome.bystanders}) == 1
    return in_step and not any(failure.transport or _is_spoilt(failure) for failure in outcome.failures.values())


def lost_ranks(outcome: RequestOutcome, ranks: Sequence[int]) -> list[int]:
    """Return the ranks that have died, do not end the request, have done half of it, or have lost their device.

    Others go on with new links.
    """
    spoilt = [rank for rank, failure in outcome.failures.items() if _is_spoilt(failure)]
    gone = {*outcome.died, *outcome.stuck, *outcome.not_reading, *spoilt}
    ended = {*outcome.results, *outcome.failures, *outcome.unwound}
    return [rank for rank in ranks if rank in gone or rank not in ended]


def _is_spoilt(failure: RemoteError) -> bool:
    """Return whether a rank that has failed cannot take another call as it is."""
    return failure.left_changes or failure.broken_device


def _died(outcome: RequestOutcome, workers: Mapping[int, RankProcess]) -> WorkerDied:
    worker = workers[outcome.died[0]]
    end = worker.how_it_ended()
    idle = worker.rank in outcome.unbegun
    where = f"before it began this call; {NEXT}" if idle else f"{worker.last_exchange_point()}."
    text = f"{worker} {end}; {where}{worker.last_output()}"
    return WorkerDied(text, rank=worker.rank, begun=not outcome.is_untouched([*workers]))


def _without_device(worker: RankProcess, outcome: RequestOutcome) -> WorkerDied:
    failure = outcome.failures[worker.rank]
    text = f"{worker} can use its device no more, and is ended: {failure.headline()}\n\n{failure.trace}"
    return WorkerDied(text, rank=worker.rank, cause=failure.type_name)


def _raised(failures: dict[int, RemoteError], outcome: RequestOutcome, workers: Mapping[int, RankProcess]) -> Exception:
    """Return the exception itself if all participating ranks raised the same, otherwise a WorkerError."""
    rank, first = next(iter(failures.items()))
    error = first.as_worker_error(str(workers[rank]), rank)
    took_part = len(workers) - len(outcome.bystanders)
    # Without memory all ranks may raise as well as one: the caller gets the same exception.
    alike = len(failures) == took_part and len({failure.type_name for failure in failures.values()}) == 1
    lowest = failures[min(failures)]
    if alike and lowest.exception is not None and not lowest.is_out_of_memory:
        lowest.exception.__cause__ = lowest.as_worker_error(str(workers[min(failures)]), None)
        return lowest.exception
    return error


def _hung(
    outcome: RequestOutcome, left: Sequence[RankProcess], workers: Mapping[int, RankProcess], limits: HangLimits
) -> WorkerHung:
    """Return the error for unfinished ranks (`left`): first silent ones, then stuck ones, then those not waiting."""
    silent = [worker for worker in left if worker.rank in outcome.silent]
    stuck = [worker for worker in left if worker.rank in outcome.stuck]
    moving = [worker for worker in left if worker.rank not in outcome.waiting]
    guilty = min(silent or stuck or moving or left, key=lambda worker: outcome.beats[worker.rank])
    guilty.dump_stack()
    time.sleep(STACK_SECONDS)
    answers = "does not answer" if silent else "answers, but makes no progress"
    others = "; ".join(
        f"rank {worker.rank}: {worker.last_exchange_point()}" for worker in workers.values() if worker is not guilty
    )
    suffix = f" ({others})" if others else ""
    way_out = "" if outcome.failures else f" If it is only slow, give it more time: {limits.way_out}."
    text = f"{guilty} {answers}: {_why(outcome, guilty, limits)}; {guilty.last_exchange_point()}{suffix}.{way_out}"
    return WorkerHung(f"{text}{guilty.last_output()}", rank=guilty.rank)


def _why(outcome: RequestOutcome, guilty: RankProcess, limits: HangLimits) -> str:
    if outcome.failures:
        rank, failure = list(outcome.failures.items())[-1]
        return f"rank {rank} has stopped waiting for it: {failure.headline()}"
    if guilty.rank in outcome.waiting:
        return f"all ranks have waited for one another for too long (limit {limits.patience:g} s)"
    if guilty.rank in outcome.working:
        return f"it has worked for too long without reaching another exchange point (limit {limits.longest_work:g} s)"
    return f"it has neither made progress nor worked for too long (limit {limits.patience:g} s)"
