"""What can go wrong in POP as a whole call. What is wrong with one handle or one message is a status in the answer."""

from __future__ import annotations


class PopError(Exception):
    """Base of all errors of POP."""


class GroupInvalid(PopError):
    """Raised for a group's name that is empty, too long, or has characters that no name may have."""


class RequestInvalid(PopError):
    """Raised for a number that is negative or out of bounds in a request."""


class Overloaded(PopError):
    """Raised when a bound of the node is reached. The message names the option that holds it; try again later."""
