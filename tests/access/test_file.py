"""The access file: what it may say, and what is wrong with others."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.access.actions import ADMIN, CONSUME, POP, PUBLISH, RECEIVE, SEND, SUBSCRIBE
from penstock.access.errors import AccessInvalid
from penstock.access.file import load_access_policy
from penstock.access.subject import Subject

WHOLE = """
[[rule]]
deny = "all"
users = ["mallory"]
topics = ["#"]
groups = ["*"]

[[rule]]
allow = ["publish"]
clients = ["sensor-*"]
topics = ["sensors/%c/#"]

[[rule]]
allow = ["read"]
addresses = ["10.0.0.0/8", "::1"]
topics = ["plant/#"]

[[role]]
name = "dashboards"
users = ["kiosk-*"]
read = ["plant/#"]

[[principal]]
name = "billing"
certificate = "billing.example.org"
roles = ["dashboards"]
write = ["invoices/#"]
consume = ["billing"]
admin = "billing"
"""


def load(tmp_path: Path, text: str) -> object:
    path = tmp_path / "access.toml"
    path.write_text(text)
    return load_access_policy(path)


def test_all_that_a_file_may_say(tmp_path: Path) -> None:
    path = tmp_path / "access.toml"
    path.write_text(WHOLE)
    policy = load_access_policy(path)
    sensor = policy.rights_of(Subject(client_id="sensor-1"))
    assert [sensor.may(action, "sensors/sensor-1/t") for action in (PUBLISH, SEND, RECEIVE)] == [True, False, False]
    assert not policy.rights_of(Subject("mallory", client_id="sensor-1")).may(PUBLISH, "sensors/sensor-1/t")
    inside = policy.rights_of(Subject(address="10.1.1.1"))
    assert [inside.may(action, "plant/#") for action in (SUBSCRIBE, POP)] == [True, True]
    assert policy.rights_of(Subject("kiosk-1")).may(SUBSCRIBE, "plant/+/x")
    billing = policy.rights_of(Subject("billing"))
    assert [billing.may(SEND, "invoices/1"), billing.may(PUBLISH, "invoices/1"), billing.may(POP, "plant/#")] == [True] * 3
    assert [billing.may(CONSUME, "billing"), billing.may(ADMIN, "billing"), billing.may(ADMIN, "x")] == [True, True, False]
    assert policy.by_certificate(["x", "billing.example.org"]) is not None


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[[principal", "not TOML"),
        ("principal = 1", "list of tables"),
        ("[other]", "other"),
        ("no_match = 'perhaps'", "no_match"),
        ("[[principal]]\nread = ['a']", "not be empty"),
        ("[[principal]]\nname = 'a'\ntoken_sha256 = '00'", "64"),
        ("[[principal]]\nname = 'a'\nwrite = 1", "write must be a list"),
        ("[[principal]]\nname = 'a'\nwrite = ['a#']", "'#'"),
        ("[[principal]]\nname = 'a'\nconsum = ['a']", "there is no consum"),
        ("[[principal]]\nname = 'a'\npublish = ['a']", "give write"),
        ("[[principal]]\nname = 'a'\nmqtt_user = 'a'", "give a \\[\\[role"),
        ("[[principal]]\nname = 'a'\n" * 2, "two principals of one name"),
        ("[[role]]\nname = 'a'\n" * 2, "two roles of one name"),
        ("[[principal]]\nname = 'a'\naccess_key = 'k'", "go together"),
        (
            "".join(f"[[principal]]\nname = '{name}'\naccess_key = 'k'\naccess_secret = 's'\n" for name in "ab"),
            "two principals of one access_key",
        ),
        ("[[rule]]\ntopics = ['a']", "rule 1: give either allow or deny"),
        ("[[rule]]\nallow = 'read'\ndeny = 'read'", "give either allow or deny"),
        ("[[rule]]\nallow = []\ntopics = ['a']", "allow has nothing"),
        ("[[rule]]\nallow = ['fly']\ntopics = ['a']", "'fly'; use publish"),
        ("[[rule]]\nallow = ['read']", r'give topics, or \["#"\]'),
        ("[[rule]]\nallow = ['consume']", r'give groups, or \["\*"\]'),
        ("[[rule]]\nallow = ['consume']\ngroups = ['g']\ntopics = ['a']", "not about topics"),
        ("[[rule]]\nallow = ['read']\ntopics = ['a']\naddresses = ['home']", "networks"),
        ("[[rule]]\nallow = ['read']\ntopics = ['']", "not empty"),
        ("[[rule]]\nallow = ['read']\ntopics = ['a']\nuser = ['b']", "there is no user; use allow"),
    ],
)
def test_a_file_that_is_wrong_says_why(tmp_path: Path, text: str, reason: str) -> None:
    with pytest.raises(AccessInvalid, match=reason):
        load(tmp_path, text)


def test_a_file_that_is_missing_says_so(tmp_path: Path) -> None:
    with pytest.raises(AccessInvalid, match="can't be read"):
        load_access_policy(tmp_path / "none.toml")
