"""What a handler raises to decide about its message, and the errors of a worker."""

from __future__ import annotations


class WorkerError(Exception):
    """Base of the errors of a worker that is set up wrongly."""


class HandlerInvalid(WorkerError, ValueError):
    """Raised when a function can't be a handler, for example because it takes no argument."""


class Reject(Exception):
    """Raise this in a handler to make a dead letter of the message, because no attempt will ever succeed.

    Parameters:
        reason: Why; shown with the dead letter.
    """

    def __init__(self, reason: str = "") -> None:
        super().__init__(reason)


class RetryLater(Exception):
    """Raise this in a handler to return the message as a failed attempt.

    Parameters:
        delay: Seconds until the message comes back, at least 0. The group's back-off is added.
        reason: Why; goes to the log.
    """

    def __init__(self, delay: float = 0.0, reason: str = "") -> None:
        if delay < 0:
            raise ValueError(f"delay is {delay}: use 0 or more seconds")
        super().__init__(reason or f"the handler asked for another attempt in {delay} s")
        self.delay = delay


class Undecodable(Exception):
    """The body of a message is not what its handler takes. The message becomes a dead letter with this as the reason."""
