"""The current denoising step, and the current call of the denoiser within it.

Pure Python: no tensors, no processes. One clock per rank, shared by reference; layers only read it.

scheduler.step()         |           |           |
denoiser calls       0   |   0   1   |   0   1   |     (one per evaluation, or two with sequential guidance)
evaluation           0   |     1     |     2     |
step, order 1        0   |     1     |     2     |
step, order 2        0   |     0     |     1     |     (second-order solvers such as Heun evaluate twice per step)
"""

from dataclasses import dataclass


@dataclass(slots=True)
class StepClock:
    """The position in the denoising loop, the only mutable state that all strategies share.

    `evaluation` counts calls of scheduler.step from 0; `order` is how many of them make a denoising step; `call` is the
    index of the latest denoiser call within the evaluation (-1 before the first). `guided`: whether the pipeline
    applies classifier-free guidance in this run; None if unknown. `branches`: the number of guidance branches of the
    latest call before the split over axis `cfg`, if there is that axis. `calls`: how many an evaluation has, as
    far as that is known in the first one.
    """

    evaluation: int = 0
    call: int = -1
    guided: bool | None = None
    order: int = 1
    branches: int = 1
    calls: int = 1

    @property
    def calls_left(self) -> int:
        """How many calls there are from the latest one to the end of the evaluation, as far as that is known."""
        return max(1, self.calls - max(0, self.call))

    @property
    def step(self) -> int:
        """Number of completed denoising steps."""
        return self.evaluation // self.order

    def reset(self, guided: bool | None = None, *, order: int = 1) -> None:
        """Go back to the first step: called once at the start of every pipeline call."""
        self.evaluation, self.call, self.guided, self.order = 0, -1, guided, order
        self.branches = self.calls = 1

    def next_call(self) -> int:
        """Count one denoiser call and return its index within the evaluation."""
        self.call += 1
        return self.call

    def tick(self) -> None:
        """Count one call of scheduler.step."""
        self.evaluation += 1
        self.call = -1
