"""Waiting for a batch: a request that others could be made together with lets an idle server wait for these a while."""

from patchpar.serving.scheduling.policies import Policy
from patchpar.serving.scheduling.state import Action, ScheduleState, WaitForBatch


def with_batch_wait(policy: Policy) -> Policy:
    """Return a policy that starts what `policy` does, but waits as `batch_begin` says. Pure, as policies are."""

    def acts(state: ScheduleState) -> tuple[Action, ...]:
        begin = batch_begin(state)
        return policy(state) if begin is None else (WaitForBatch(begin),)

    return acts


def batch_begin(state: ScheduleState) -> float | None:
    """Return the time until which the server waits for more requests like those that wait; None to start now.

    That is `batch_wait` after the oldest has come, and early enough for each to meet its deadline. Only where nothing
    else is kept from its devices: nothing runs, and all that wait are alike and do not fill a batch.
    """
    waiting = state.waiting
    if not waiting or state.free < state.devices or len(waiting) >= state.batch:
        return None
    if waiting[0].batch_key is None or any(each.batch_key != waiting[0].batch_key for each in waiting):
        return None
    latest = (each.deadline - each.seconds(each.largest(state.devices) or each.degrees[0]) for each in waiting)
    begin = min(min(each.arrival for each in waiting) + state.batch_wait, *latest)
    return begin if begin > state.now else None
