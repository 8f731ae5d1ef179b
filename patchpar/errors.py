"""The exceptions of patchpar. Every message gives the value, the limit and the way out.

PatchparError
├── PlanError (ValueError)        the plan, the size or an argument is invalid; nothing has run
├── UnsupportedModel (PlanError)  this pipeline or denoiser cannot be split in this way
├── ArgumentMismatch (PlanError)  under torchrun the processes do not make the same call
├── ExchangeError                 a message between ranks did not arrive, or is not the expected one
├── AuthenticationError           a message between hosts is not from the rank that should have sent it
├── VerificationError             the split forward differs from the plain one; the message has the errors
├── CallCancelled                 the call was cancelled
│   └── CallSuspended             it can go on later, from where it was
├── ReplayMismatch                a suspended call cannot go on here from where it was
├── LaunchError                   workers could not be started, or could not load the model
└── WorkerError                   an exception in a worker
    ├── WorkerDied                its process ended, or its device failed
    ├── WorkerHung                it missed the deadline
    ├── WorkerOutOfMemory         its device has too little memory for the call
    └── RetriesExhausted          a job was made again as often as it may be, and has lost a worker each time
"""


class PatchparError(Exception):
    """Base class of all errors that patchpar raises."""


class PlanError(PatchparError, ValueError):
    """The plan, the image size or an argument is invalid. Raised before any worker runs."""


class UnsupportedModel(PlanError):
    """This pipeline or denoiser cannot be split in this way; the message gives an alternative."""


class ExchangeError(PatchparError, RuntimeError):
    """A message between ranks was late, lost or of the wrong size; names rank, peer, exchange point and shapes."""


class AuthenticationError(PatchparError, RuntimeError):
    """A message between hosts is not from the rank that should have sent it, or not as it was sent; it was not read."""


class ArgumentMismatch(PlanError):
    """Under torchrun the processes do not make the same call with the same arguments. Nothing has run.

    The message names the rank, the argument, and its values on rank 0 and on that rank.
    """


class VerificationError(PatchparError, RuntimeError):
    """The split denoiser does not reproduce the plain one."""


class CallCancelled(PatchparError):
    """The call was cancelled by its caller, before it began or between two calls of a denoiser."""


class CallSuspended(CallCancelled):
    """The job was suspended: `job.suspend()` returned what it takes to go on with it."""


class ReplayMismatch(PatchparError, RuntimeError):
    """With the recorded predictions the pipeline came to other latents than when they were recorded."""


class LaunchError(PatchparError, RuntimeError):
    """Workers could not be started, or could not load the model."""


class WorkerError(PatchparError, RuntimeError):
    """An exception in a worker; the message ends with the worker's traceback.

    `rank`: the one that failed, if known. `cause`: the name of the exception's class there, with its module unless it
    is a builtin; empty if there was none.
    """

    def __init__(self, message: str = "", *, rank: int | None = None, cause: str = "") -> None:
        super().__init__(message)
        self.rank, self.cause = rank, cause


class WorkerDied(WorkerError):
    """A worker process ended before it had finished, or was ended, since its device has failed.

    `begun`: whether a rank had begun the call, or may have.
    """

    def __init__(self, message: str = "", *, rank: int | None = None, cause: str = "", begun: bool = True) -> None:
        super().__init__(message, rank=rank, cause=cause)
        self.begun = begun


class WorkerHung(WorkerError):
    """A worker missed the deadline."""


class WorkerOutOfMemory(WorkerError):
    """A worker's device has too little memory for the call. The worker is alive, and takes the next call.

    `free`: what is free on each rank, in words; empty if that is unknown.
    """

    def __init__(self, message: str = "", *, rank: int | None = None, cause: str = "", free: str = "") -> None:
        super().__init__(message, rank=rank, cause=cause)
        self.free = free


class RetriesExhausted(WorkerError):
    """A job has lost a worker each time it was made: as often as `max_retries` allows, and once more."""
