"""Users and rules over the admin API of a node."""

from __future__ import annotations

from pathlib import Path

import aiohttp
from argon2 import PasswordHasher

from tests.gateway.wire import Broker
from tests.node.adminapi import Api

ACCESS = """
no_match = "allow"

[[rule]]
deny = ["publish"]
users = ["sensor-*"]
addresses = ["10.0.0.0/8"]
topics = ["hr/#", "pay/%u"]

[[role]]
name = "viewer"
users = ["ann"]

[[principal]]
name = "billing"
token_sha256 = "0000000000000000000000000000000000000000000000000000000000000000"
roles = ["operator"]
"""


async def test_users_and_rules_are_listed_without_secrets(tmp_path: Path) -> None:
    cheap = PasswordHasher(time_cost=1, memory_cost=8, parallelism=1).hash("x")
    files = {"access.toml": ACCESS, "passwords": f"ann:{cheap}\nbob:{cheap}\n"}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o600)
    options = {"access_file": str(tmp_path / "access.toml"), "control": {"password_file": str(tmp_path / "passwords")}}
    broker = await Broker(tmp_path / "data", options).start()
    async with aiohttp.ClientSession(f"http://{broker.node.admin}") as session:
        api = Api(session)
        users = await api.pages("/access/users", limit=1)
        assert [(each["user"], each["has_password"], each["is_principal"], each["roles"]) for each in users] == [
            ("ann", True, False, ["viewer"]),
            ("billing", False, True, ["operator"]),
            ("bob", True, False, []),
        ]
        assert [each["user"] for each in await api.pages("/access/users", contains="B")] == ["billing", "bob"]
        page = await api.get("/access/rules", limit=1)
        assert (page["rules"], page["no_match"], page["next"]) == (1, "allow", None)
        (rule,) = page["items"]
        assert (rule["number"], rule["source"], rule["allows"], rule["actions"]) == (1, "rule 1", False, ["publish"])
        assert (rule["users"], rule["addresses"], rule["topics"]) == (["sensor-*"], ["10.0.0.0/8"], ["hr/#", "pay/%u"])
        assert (await api.get("/access/rules", after="9"))["items"] == []
        status, why = await api.refused("GET", "/access/rules?after=first")
        assert (status, "number of a rule" in why) == (400, True)
    await broker.stop()
