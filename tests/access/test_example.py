"""The example of an access file in docs/, used as it is."""

from __future__ import annotations

import pytest

from penstock.access.file import load_access_policy
from penstock.access.policy import AccessPolicy
from penstock.access.subject import Subject
from tests.layout import ROOT


@pytest.fixture(scope="module")
def policy() -> AccessPolicy:
    return load_access_policy(ROOT / "docs" / "access.toml")


@pytest.mark.parametrize(
    ("user", "action", "name", "may"),
    [
        ("sensor-7", "publish", "plant/sensor-7/t", True),
        ("sensor-7", "publish", "plant/sensor-8/t", False),
        ("sensor-7", "subscribe", "commands/sensor-7/#", True),
        ("sensor-7", "subscribe", "commands/#", False),
        ("sensor-7", "consume", "devices-a", True),
        ("", "consume", "devices-a", False),
        ("kiosk-1", "consume", "devices-a", False),
        ("sensor-7", "subscribe", "$share/devices-a/jobs/press", True),
        ("sensor-7", "subscribe", "$share/devices-a/plant/#", False),
        ("sensor-7", "subscribe", "$share/billing/jobs/press", False),
        ("kiosk-1", "subscribe", "plant/#", True),
        ("kiosk-1", "subscribe", "hr/notices", False),
        ("billing", "pop", "orders/+", True),
        ("billing", "pop", "hr/#", False),
        ("billing", "send", "invoices/1", True),
        ("billing", "admin", "billing", True),
        ("billing", "admin", "other", False),
    ],
)
def test_the_example_says_what_its_comments_say(policy: AccessPolicy, user: str, action: str, name: str, may: bool) -> None:
    assert policy.rights_of(Subject(user)).may(action, name) is may


def test_the_token_of_the_example_is_known(policy: AccessPolicy) -> None:
    found = policy.by_token("s3cret")
    assert found is not None
    assert found.name == "billing"
