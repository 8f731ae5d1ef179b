"""One call of a denoiser on one stage: which blocks run here, what is received for the others, what is sent."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from patchpar.comm.collectives import AxisComm
from patchpar.comm.transport import Messages, Work
from patchpar.errors import UnsupportedModel
from patchpar.shard.stages.block_hooks import GivenTo, Run, given_to
from patchpar.shard.stages.block_outputs import OutputStructure, Placeholders
from patchpar.shard.stages.layout import StageLayout

KIND, OUTPUT = "stage", "prediction"  # in statistics: what goes to the next stage, and from the last one to all


class OtherShapes(UnsupportedModel):
    """Blocks are given tensors of shapes that are not those of any layout; raised on all stages at the same block.

    What was sent before has arrived.
    """


class StagePass:
    """Called for each block call of one pass. `alone`: stages receive zeros, a negative control.

    `layouts`: those of calls whose arguments have the same shapes, all with the same cuts. Which of them it is shows
    in what blocks are given, `given` of each: every stage sees that at each block, which it runs or not.
    `name`: of the pass, in errors, where a denoiser call has several.
    """

    def __init__(
        self,
        mesh: AxisComm,
        layouts: Sequence[StageLayout],
        placeholders: Placeholders,
        name: str = "",
        *,
        alone: bool,
        given: GivenTo = given_to,
    ) -> None:
        (self._comm, self._axis), self._layouts, self._alone = mesh, layouts, alone
        self._given = given
        self._layout = layout = layouts[0]
        self._suffix = f", {name}" if name else ""
        self._arriving: Work[Messages] | None = None
        self._placeholders, self._own = placeholders, layout.own_calls(self._axis.rank)
        self._outputs: dict[int, tuple[Tensor, ...]] = {}  # by call, as they are sent
        self.sent: list[Work[Messages]] = []
        """Messages to other stages."""

    def __call__(self, number: int, path: str, run: Run) -> Any:
        """Return the output of a block. Raises OtherShapes, UnsupportedModel, ExchangeError."""
        calls = self._layout.calls
        if number >= len(calls) or calls[number].path != path:
            raise self._otherwise(f"calls {path} as block {number}")
        if number < self._layout.first:
            return run()
        layout = self._layout = self._chosen(number, path, run)
        form = layout.calls[number].form
        if number in self._own:
            output = run()
            if not form.fits(output):
                raise self._otherwise(f"gets an output of another shape from {path}")
            self._pass_on(number, form, output)
            return output
        if number in layout.carried_into(self._axis.rank):
            return form.received(self._received(number))
        return self._placeholders.output(form)

    def _chosen(self, number: int, path: str, run: Run) -> StageLayout:
        """Return a layout of such calls. Arguments of the same shapes may give blocks another number of tokens.

        As many as a mask says, where the network leaves out what it masks.
        """
        given = self._given(run)
        self._layouts = [each for each in self._layouts if each.calls[number].given == given]
        if self._layouts:
            return self._layouts[0]
        refusal = self._otherwise(f"gives {path} other shapes")
        if not self._layout.is_between_messages(number):
            raise refusal
        self.wait()
        raise OtherShapes(str(refusal))

    def _otherwise(self, what: str) -> UnsupportedModel:
        return UnsupportedModel(
            f"a model in stages {what}, other than at the first call with the same arguments, so that the other stages "
            "do not know it: use stage=1, and patch"
        )

    def receive(self) -> None:
        """Start to receive what the stage before sends, if there is one; else it starts where it is needed."""
        before = self._axis.before
        if before is None or self._arriving is not None:
            return
        forms = [self._layout.calls[each].form for each in self._layout.carried_into(self._axis.rank)]
        where = f"output of {self._layout.calls[self._own.start - 1].path}{self._suffix}"
        specs = [spec for form in forms for spec in form.specs]
        self._arriving = self._comm.receive(KIND, where, before, specs)

    def _received(self, number: int) -> tuple[Tensor, ...]:
        """Return what the stage before has sent for a call; its message is waited for at the first one."""
        if number not in self._outputs:
            self.receive()
            assert self._arriving is not None
            ((*tensors,),) = self._arriving.wait()
            calls = self._layout.carried_into(self._axis.rank)
            forms = [self._layout.calls[each].form for each in calls]
            arrived = iter(tensors)
            for each, form in zip(calls, forms, strict=True):
                of_call = tuple(next(arrived) for _ in form.specs)
                self._outputs[each] = tuple(x.zero_() for x in of_call) if self._alone else of_call
        return self._outputs[number]

    def _pass_on(self, number: int, form: OutputStructure, output: Any) -> None:
        """Keep what the next stage needs, and send it after the last own block."""
        calls = self._layout.carried_out(self._axis.rank)
        if number in calls:
            self._outputs[number] = form.sent(output)
        after = self._axis.after
        if after is None or number != self._own.stop - 1:
            return
        for each in calls:
            self._received(each)
        tensors = [x for each in calls for x in self._outputs[each]]
        where = f"output of {self._layout.calls[number].path}{self._suffix}"
        self.sent.append(self._comm.send(KIND, where, [after], tensors))

    def check(self, count: int) -> None:
        """Raise UnsupportedModel unless so many block calls are those of the pass."""
        if count != len(self._layout.calls):
            raise self._otherwise(f"calls {count} blocks")

    def finish(self, output: Any) -> Any:
        """Return the last stage's output. Raises UnsupportedModel, ExchangeError."""
        form, axis, last = self._layout.output, self._axis, self._axis.ranks[-1]
        if axis.after is None:
            if not form.fits(output):
                raise self._otherwise("returns an output of another shape")
            others = [rank for rank in axis.ranks if rank != last]
            self.sent.append(self._comm.send(OUTPUT, "output of the last stage", others, form.sent(output)))
        else:
            (tensors,) = self._comm.receive(OUTPUT, "output of the last stage", last, form.specs).wait()
            output = form.received(tensors)
        self.wait()
        return output

    def wait(self) -> None:
        """Wait until everything is sent. Raises ExchangeError."""
        for work in self.sent:
            work.wait()
