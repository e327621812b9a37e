"""The access file: a TOML file that names the principals, and what each of them may do.

    [[principal]]
    name = "billing"
    token_sha256 = "9f86d081884c7d65..."   # SHA-256 of the token that its calls carry as `authorization: Bearer TOKEN`
    certificate = "billing.example.org"    # or: a name in its client certificate (mTLS)
    access_key = "billing"                 # or: the key that RocketMQ clients sign with, together with
    access_secret = "..."                  # this secret, in plain text: a signature can't be checked by a hash
    mqtt_user = "billing-*"                # or: MQTT user names; `*` and `?` are wildcards
    publish = ["orders/#"]                 # topic filters to which it may publish
    consume = ["billing", "audit-*"]       # groups that it may consume; `*` and `?` are wildcards
    admin = ["billing"]                    # groups that it may create, change, reset, delete and redrive

The node reads the file once, when it starts. The file holds hashes of tokens, not tokens; `printf %s TOKEN | sha256sum` makes
one. A file with access secrets must be readable by the node only. Health checks need no principal; reflection needs any.

A RocketMQ signature covers the time that the client states, and nothing else of the call (docs/transport.md of the RocketMQ
clients). The clients state their local time and call it UTC, so the node can't check the age of a signature. Anybody who reads
a signature on the network can therefore use it: use TLS.

Over MQTT, `$share/GROUP/FILTER` consumes the group GROUP. A group that some principal's `consume` names belongs to a back end.
Of MQTT users, only those may share it whose principal's `consume` names it too. Devices may share groups that the file doesn't
name among themselves, because nobody can consume such a group over gRPC. A user name counts if the gateway's plugins or a
client certificate vouch for it; `mqtt_user = "*"` is everybody, also clients without a name. The plugins decide what else a
client may do over MQTT (publish, or subscribe to FILTER).
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from penstock.pop.access.policy import AccessPolicy, Principal
from penstock.store import topics

SHA256_DIGITS = 64

_CREDENTIALS = ("token_sha256", "certificate", "access_key", "access_secret", "mqtt_user")


class AccessInvalid(ValueError):
    """Raised when an access file can't be read, or contains something that it must not."""


def load_access_policy(path: Path) -> AccessPolicy:
    """Return the policy that an access file describes.

    Raises:
        AccessInvalid: the message says what is wrong with the file.
    """
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise AccessInvalid(f"the access file {path} can't be read: {error.strerror}") from error
    except ValueError as error:
        raise AccessInvalid(f"the access file {path} is not TOML: {error}") from error
    rows = document.pop("principal", [])
    if document or not isinstance(rows, list):
        raise AccessInvalid(f"the access file {path} has {', '.join(document) or 'a principal'} where [[principal]] should be")
    principals = [_principal(path, row) for row in rows]
    if len({principal.name for principal in principals}) < len(principals):
        raise AccessInvalid(f"the access file {path} has two principals of one name")
    keys = [principal.access_key for principal in principals if principal.access_key]
    if len(set(keys)) < len(keys):
        raise AccessInvalid(f"the access file {path} has two principals of one access key")
    return AccessPolicy(principals)


def _principal(path: Path, row: Any) -> Principal:
    texts = {name: row.pop(name, "") for name in ("name", *_CREDENTIALS)}
    lists = {name: row.pop(name, []) for name in ("publish", "consume", "admin")}
    where = f"the access file {path}, principal {texts['name']!r}"
    if row:
        raise AccessInvalid(f"{where}: a principal has no {', '.join(row)}")
    if not all(isinstance(value, str) for value in texts.values()) or not texts["name"]:
        raise AccessInvalid(f"{where}: name, {', '.join(_CREDENTIALS)} must be text, and the name must not be empty")
    if not all(isinstance(value, list) and all(isinstance(each, str) for each in value) for value in lists.values()):
        raise AccessInvalid(f"{where}: publish, consume and admin must be lists of text")
    token = texts["token_sha256"].lower()
    if token and (len(token) != SHA256_DIGITS or not all(c in "0123456789abcdef" for c in token)):
        raise AccessInvalid(f"{where}: token_sha256 must have {SHA256_DIGITS} hexadecimal digits")
    if bool(texts["access_key"]) != bool(texts["access_secret"]):
        raise AccessInvalid(f"{where}: access_key and access_secret go together")
    if not (token or texts["certificate"] or texts["access_key"]):
        if not texts["mqtt_user"]:
            raise AccessInvalid(
                f"{where}: give token_sha256, certificate, access_key or mqtt_user, so that the node can recognize it"
            )
        if lists["publish"] or lists["admin"]:
            raise AccessInvalid(
                f"{where}: for an MQTT user this file decides consume only; the gateway's plugins decide who may publish"
            )
    for allowed in lists["publish"]:
        topics.check_filter(allowed)
    publish, consume, admin = (tuple(lists[name]) for name in ("publish", "consume", "admin"))
    texts["token_sha256"] = token
    return Principal(**texts, publish=publish, consume=consume, admin=admin)
