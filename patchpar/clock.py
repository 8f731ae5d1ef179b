"""When things happen: which denoising step this is, and which call of the denoiser within it.

Pure Python: no tensors, no processes. One clock per rank, shared by reference; layers never count.

scheduler.step()         |           |           |
denoiser calls       0   |   0   1   |   0   1   |     (one per step, or two with sequential guidance)
step                 0   |     1     |     2     |
"""

from dataclasses import dataclass


@dataclass(slots=True)
class StepClock:
    """The one mutable fact that all strategies share: where we are in the denoising loop.

    `step` counts scheduler steps from 0; `call` is the index of the latest denoiser call within the step (-1 before
    the first). `guided` says whether the pipeline applies classifier-free guidance in this run; None when it does
    not tell.
    """

    step: int = 0
    call: int = -1
    guided: bool | None = None

    def reset(self, guided: bool | None = None) -> None:
        """Back to the first step: called once at the start of every pipeline call."""
        self.step, self.call, self.guided = 0, -1, guided

    def next_call(self) -> int:
        """Count one denoiser call and return its index within the step."""
        self.call += 1
        return self.call

    def tick(self) -> None:
        """One scheduler step is done."""
        self.step += 1
        self.call = -1
