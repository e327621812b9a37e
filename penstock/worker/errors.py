"""What a handler raises to decide about its message, and the errors of a worker."""

from __future__ import annotations

from penstock.pop.client.durations import Duration, seconds


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
        delay: Time until the message comes back, in seconds or as a timedelta. The group's back-off is added. The attribute
            has it in seconds.
        reason: Why; goes to the log.
    """

    def __init__(self, delay: Duration = 0.0, reason: str = "") -> None:
        self.delay = seconds(delay, "delay")
        super().__init__(reason or f"the handler asked for another attempt in {self.delay:g} s")


class Undecodable(Exception):
    """The body of a message is not what its handler takes. The message becomes a dead letter with this as the reason."""
