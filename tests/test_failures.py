"""What runs again after a failure, and what counts at once."""

from __future__ import annotations

import pytest

from tests.failures import FAILURES_MAX, judge, tells_of_loss

SLOW = "    assert not lost\nE       TimeoutError\n"
LOSS = "    assert not missing\nE       AssertionError: acknowledged, and gone\nE       assert not {3}\n"


@pytest.mark.parametrize(
    ("reports", "passing", "is_green", "said"),
    [
        ({"slow": SLOW}, {"slow"}, True, "flaky: slow"),
        ({"slow": SLOW}, set(), False, "failed: slow failed twice"),
        ({"loss": LOSS}, {"loss"}, False, "failed: loss says that messages were lost"),
        ({"slow": SLOW, "loss": LOSS}, {"slow"}, False, "flaky: slow"),
        ({f"slow {n}": SLOW for n in range(FAILURES_MAX + 1)}, {"slow 0"}, False, "11 tests failed"),
        ({}, set(), True, ""),
    ],
)
def test_a_failure_that_does_not_come_again_is_forgiven_unless_it_tells_of_a_loss(
    reports: dict[str, str], passing: set[str], is_green: bool, said: str
) -> None:
    lines: list[str] = []
    assert judge(reports, passing.__contains__, lines.append) == is_green
    assert said in "\n".join(lines)


def test_only_the_error_of_a_report_tells_of_a_loss() -> None:
    assert tells_of_loss(LOSS)
    assert not tells_of_loss(SLOW)
