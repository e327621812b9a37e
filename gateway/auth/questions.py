"""Questions to the plugins that wait for an answer."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, TypeAlias

from penstock.gateway.logbook import Logbook
from penstock.gateway.options import AccessOptions

if TYPE_CHECKING:
    from penstock.gateway.auth.plugins import Plugins

Work: TypeAlias = Callable[[], Coroutine[Any, Any, Any]]
"""Begins to ask the plugins. It is called on their thread, and what it returns runs there."""


class Question:
    """A question that is answered exactly once: by the plugins, or by a timeout.

    Parameters:
        answered: gets the result and an empty string; or None and "timeout" or "error".
        note_failure: gets the error if a plugin fails.
    """

    __slots__ = ("_answered", "_note_failure", "is_answered")

    def __init__(self, answered: Callable[[Any, str], None], note_failure: Callable[[str], None]) -> None:
        self._answered = answered
        self._note_failure = note_failure
        self.is_answered = False

    def answer(self, result: Any, error: str) -> None:
        """Take the answer. A second one is ignored."""
        if self.is_answered:
            return
        self.is_answered = True
        if error:
            self._note_failure(error)
        self._answered(result, "" if not error else "timeout" if error == "timeout" else "error")


class Questions:
    """The questions of all clients.

    Parameters:
        options: the options of access control.
        logbook: failures of plugins are logged there.
    """

    def __init__(self, options: AccessOptions, logbook: Logbook) -> None:
        self._options = options
        self._logbook = logbook
        self._now_s: Callable[[], float]
        self._deadlines: deque[tuple[float, Question]] = deque()
        self.waiting = 0
        """The number of questions that wait for an answer."""
        self.outcomes: dict[tuple[str, str], int] = {}
        """The number of answers by action and outcome: allowed or denied; or error, timeout or overload if there was none."""

    def start(self, now_s: Callable[[], float]) -> None:
        """Use this clock: it returns the monotonic time in seconds."""
        self._now_s = now_s

    def ask(
        self,
        plugins: Plugins,
        work: Work,
        answered: Callable[[Any, str], None],
    ) -> None:
        """Ask the plugins, unless too many questions wait.

        Args:
            plugins: run the question.
            work: calls one of the coroutines of `Plugins`.
            answered: gets the result and an empty string; or None and "timeout", "error" or "overload".
        """
        if self.waiting >= self._options.questions_max:
            answered(None, "overload")
            return

        def finished(result: Any, outcome: str) -> None:
            self.waiting -= 1
            answered(result, outcome)

        asked = Question(finished, self.note_failure)
        self.waiting += 1
        # The plugins' thread cancels a question that takes too long. This deadline is for a plugin that blocks the thread.
        self._deadlines.append((self._now_s() + self._options.plugin_timeout_ms / 1000 + 1, asked))
        plugins.ask(work, asked)

    def expire(self) -> None:
        """Answer the questions whose deadline is over."""
        now_s = self._now_s()
        while self._deadlines and (self._deadlines[0][0] <= now_s or self._deadlines[0][1].is_answered):
            self._deadlines.popleft()[1].answer(None, "timeout")

    def count(self, action: str, outcome: str) -> None:
        """Count a decision."""
        self.outcomes[action, outcome] = self.outcomes.get((action, outcome), 0) + 1

    def note_failure(self, error: str) -> None:
        """Log the failure of a plugin."""
        self._logbook.note("plugins.failed", why=error)
