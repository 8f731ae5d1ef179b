"""What can go wrong, as a tree. Every message gives the value, the limit and the way out.

PatchparError
├── PlanError (ValueError)        the plan, the size or an argument cannot work; nothing has run
├── UnsupportedModel (PlanError)  this pipeline or denoiser cannot be split this way
├── ArgumentMismatch (PlanError)  under torchrun the processes do not make the same call
├── ExchangeError                 a message between ranks did not arrive, or is not what was expected
├── VerificationError             the split forward differs from the plain one; figures in the message
├── LaunchError                   workers could not be started, or could not load the model
└── WorkerError                   something went wrong in a worker
    ├── WorkerDied                its process ended
    └── WorkerHung                it missed the deadline
"""


class PatchparError(Exception):
    """Base of every error that patchpar raises itself."""


class PlanError(PatchparError, ValueError):
    """The plan, the picture size or an argument cannot work. Raised before any worker does work."""


class UnsupportedModel(PlanError):
    """This pipeline or denoiser cannot be split this way; the message says what can be done."""


class ExchangeError(PatchparError, RuntimeError):
    """A message between ranks was late, lost or of the wrong size; names rank, peer, seam and shapes."""


class ArgumentMismatch(PlanError):
    """Under torchrun the processes do not make the same call with the same arguments. Nothing has run.

    The message names the rank, the argument, and the values on rank 0 and there.
    """


class VerificationError(PatchparError, RuntimeError):
    """The split denoiser does not reproduce the plain one."""


class LaunchError(PatchparError, RuntimeError):
    """Workers could not be started, or could not load what they were asked to."""


class WorkerError(PatchparError, RuntimeError):
    """An exception in a worker; the message ends with the worker's own traceback.

    `rank`: the one at fault, where that is known.
    """

    def __init__(self, message: str = "", *, rank: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank


class WorkerDied(WorkerError):
    """A worker process ended while it was needed."""


class WorkerHung(WorkerError):
    """A worker missed the deadline."""
