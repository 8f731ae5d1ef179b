"""A suspended call as a value: what it takes to go on with it in another process, on other ranks, with another plan.

suspended = job.suspend()
suspended.save("call.safetensors")                                 tensors, and JSON; no pickle
pipe.submit(**arguments, resume=SuspendedCall.load("call.safetensors"))

The arguments are not in it: it has their digests only, so that others are refused. Does not import torch.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from patchpar.errors import PlanError
from patchpar.launch.argument_mismatch import described
from patchpar.pipeline.call_journal import CallJournal
from patchpar.pipeline.caller import CallController
from patchpar.pipeline.messages import CallbackChange, CallbackResult, RecordedPrediction, TensorBytes
from patchpar.pipeline.state_changes import SETS
from patchpar.pipeline.tensor_file import TensorTable, read_tensors, write_tensors
from patchpar.shard.generators import generators_of

FORMAT = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SuspendedCall:
    """A job that was suspended before a call of its denoiser.

    `pipeline`: the class of the pipeline. `digests`: of the arguments, by name. `calls`: the denoiser calls that need
    not be made again, of each of `groups` prompt groups. `generators`: their states at the beginning, uint8 [N];
    `seed`: of the noise of a job without one. `answers` of its callback, with TensorBytes. `step` of `steps` are done.
    `why_from_start`: why it starts from its beginning, if it does.
    """

    pipeline: str
    digests: Mapping[str, str]
    calls: tuple[RecordedPrediction, ...] = ()
    groups: int = 1
    generators: tuple[TensorBytes, ...] = ()
    seed: int | None = None
    answers: tuple[CallbackResult, ...] = ()
    step: int = 0
    steps: int = 0
    why_from_start: str = ""

    @property
    def num_calls(self) -> int:
        """Number of denoiser calls that need not be made again."""
        return len(self.calls) // self.groups

    @classmethod
    def of(
        cls, caller: CallController, journal: CallJournal, pipeline: str, generators: tuple[TensorBytes, ...]
    ) -> SuspendedCall:
        """Return a job's call as it is now. `generators`: their states when the job began."""
        calls, answers, reason = journal.calls, _answers(caller.answers), journal.why_not
        if answers is None:
            calls, answers, reason = (), (), "its callback has changed the pipeline by more than plain values"
        return cls(
            pipeline=pipeline,
            digests=_digests(caller),
            calls=calls,
            groups=journal.groups,
            generators=generators,
            seed=caller.seed,
            answers=answers if calls else (),
            step=caller.progress[0],
            steps=caller.progress[1],
            why_from_start=reason,
        )

    def hand_over(self, caller: CallController, pipeline: str) -> None:
        """Let a new call go on where this one was. Raises PlanError if its arguments or its pipeline are others."""
        if pipeline != self.pipeline:
            raise PlanError(f"resume: the call that was suspended is one of {self.pipeline}, and this is a {pipeline}")
        given = _digests(caller)
        for name in {**self.digests, **given}:
            if self.digests.get(name) != given.get(name):
                raise PlanError(
                    f"resume: argument {name!r} is not that of the call which was suspended: give the same arguments, "
                    "or leave resume out"
                )
        journal = CallJournal()
        journal.take_up(self.calls, self.groups)
        caller.resume(journal, self.seed, list(map(_with_tensors, self.answers)))
        restore_states(caller.bound, self.generators)

    def save(self, path: str | Path) -> None:
        """Write it to a safetensors file, with all else as JSON in the file's metadata. Raises OSError.

        A call whose callback has called methods other than those that set, enable or disable starts from its beginning
        there: no file brings the name of any other method that is then called.
        """
        changes = [change for answer in self.answers for change in answer.changes]
        if not all(map(_is_of_files, changes)):
            reason = "its callback has called methods whose names no file may bring"
            replace(self, calls=(), answers=(), why_from_start=reason).save(path)
            return
        table = TensorTable()
        facts = {
            "format": FORMAT,
            "pipeline": self.pipeline,
            "digests": dict(self.digests),
            "calls": [
                [call.number, call.group, call.checksum, call.form, [table.add(each) for each in call.tensors]]
                for call in self.calls
            ],
            "groups": self.groups,
            "generators": [table.add(state) for state in self.generators],
            "seed": self.seed,
            "answers": [_answer_as_json(answer, table) for answer in self.answers],
            "progress": [self.step, self.steps],
            "why_from_start": self.why_from_start,
        }
        write_tensors(Path(path), table, facts)

    @classmethod
    def load(cls, path: str | Path) -> SuspendedCall:
        """Read what `save` has written. Raises PlanError for any other file."""
        table, facts = read_tensors(Path(path))
        try:
            return cls._of_json(facts, table)
        except (KeyError, IndexError, TypeError, ValueError, struct.error) as error:
            raise PlanError(f"{path} is no suspended call that this version can read: {error!r}") from error

    @classmethod
    def _of_json(cls, facts: Mapping[str, Any], table: TensorTable) -> SuspendedCall:
        if facts["format"] != FORMAT:
            raise ValueError(f"format {facts['format']!r}, where {FORMAT} is known")
        step, steps = facts["progress"]
        return cls(
            pipeline=str(facts["pipeline"]),
            digests={str(name): str(digest) for name, digest in facts["digests"].items()},
            calls=tuple(
                RecordedPrediction(
                    number=int(number),
                    group=int(group),
                    checksum=int(checksum),
                    form=form,
                    tensors=tuple(map(table.get, tensors)),
                )
                for number, group, checksum, form, tensors in facts["calls"]
            ),
            groups=max(1, int(facts["groups"])),
            generators=tuple(map(table.get, facts["generators"])),
            seed=None if facts["seed"] is None else int(facts["seed"]),
            answers=tuple(_answer_of_json(answer, table) for answer in facts["answers"]),
            step=int(step),
            steps=int(steps),
            why_from_start=str(facts["why_from_start"]),
        )


def _digests(caller: CallController) -> dict[str, str]:
    """Return digests of a call's arguments, and of its adapters."""
    return digests_of({**caller.bound, "adapters": caller.adapters})


def digests_of(arguments: Mapping[str, Any]) -> dict[str, str]:
    """Return a digest of each argument that is given; of generators and functions only that there is one."""
    given = {name: value for name, value in arguments.items() if value is not None}
    found = json.loads(described("call", (), given))
    return {name.partition(":")[2]: digest for name, (digest, _) in found.items() if name != "method"}


def states_of(arguments: Mapping[str, Any]) -> tuple[TensorBytes, ...]:
    """Return the states of the generators among arguments, uint8 [N] each."""
    found = generators_of(arguments)
    if not found:
        return ()
    from patchpar.pipeline.tensor_bytes import tensor_bytes  # torch is imported: there is a generator

    return tuple(tensor_bytes(generator.get_state()) for generator in found)


def restore_states(arguments: Mapping[str, Any], states: Sequence[TensorBytes]) -> None:
    """Set the generators among arguments to states of `states_of`."""
    for generator, state in zip(generators_of(arguments), states, strict=False):
        generator.set_state(_tensor(state))


def _tensor(each: TensorBytes) -> Any:
    from patchpar.pipeline.tensor_bytes import tensor_of

    return tensor_of(each)


def _answers(results: Sequence[CallbackResult]) -> tuple[CallbackResult, ...] | None:
    """Return answers of callbacks with TensorBytes; None if they hold more than tensors and plain values."""
    if not results:
        return ()
    from patchpar.pipeline.tensor_bytes import tensor_bytes

    try:
        changes = [[[each.path, list(each.args), each.kwargs] for each in result.changes] for result in results]
        if json.loads(json.dumps(changes)) != changes:
            return None
        return tuple(
            replace(each, tensors={name: tensor_bytes(value) for name, value in each.tensors.items()})
            for each in results
        )
    except (TypeError, ValueError, AttributeError):
        return None


def _with_tensors(answer: CallbackResult) -> CallbackResult:
    return replace(answer, tensors={name: _tensor(value) for name, value in answer.tensors.items()})


def _answer_as_json(answer: CallbackResult, table: TensorTable) -> list[Any]:
    tensors = {name: table.add(value) for name, value in answer.tensors.items()}
    return [tensors, [[each.path, list(each.args), each.kwargs] for each in answer.changes]]


def _answer_of_json(found: Any, table: TensorTable) -> CallbackResult:
    tensors, listed = found
    changes = tuple(CallbackChange(str(path), tuple(args), kwargs) for path, args, kwargs in listed)
    if not all(map(_is_of_files, changes)):
        raise ValueError(f"a callback is said to have called one of {', '.join(each.path for each in changes)}")
    return CallbackResult(tensors={str(name): table.get(number) for name, number in tensors.items()}, changes=changes)


def _is_of_files(change: CallbackChange) -> bool:
    """Whether a file may bring a change: of an attribute, or by a method that sets, enables or disables something.

    Others save, load and download what their arguments say. Offloading may write to a folder.
    """
    *owners, name = change.path.split(".")
    if any(part.startswith("_") for part in owners) or name.startswith("__"):
        return False
    return change.kwargs is None or (name.partition("_")[0] in SETS and "offload" not in name)
