"""The access file: a TOML file with rules, roles and principals. docs/guides/access.md explains it by example.

    no_match = "deny"                      # or "allow": what applies to actions that nothing below speaks of

    [[rule]]                               # the first rule that applies decides
    allow = ["publish"]                    # or deny = [...]: publish, subscribe, receive, send, pop, read, write, all
    users = ["dev-*"]                      # user names; also roles, clients (client ids) and addresses (networks)
    topics = ["devices/%u/#"]              # filters; %u is the user name, %c the client id

    [[rule]]
    deny = ["consume"]                     # or admin: these two are about groups
    groups = ["internal-*"]

    [[role]]                               # what bearers of a role may do, after the rules
    name = "dashboards"
    users = ["kiosk-*"]                    # who has it, besides those whose token or certificate names it
    read = ["plant/#"]
    write = []
    consume = []                           # groups; `*` and `?` are wildcards
    admin = []                             # groups that they may create, change, reset, delete and redrive

    [[principal]]                          # a user that calls over gRPC
    name = "billing"
    token_sha256 = "9f86d081884c7d65..."   # SHA-256 of the token that its calls carry as `authorization: Bearer TOKEN`
    certificate = "billing.example.org"    # or: a name in its client certificate (mTLS)
    access_key = "billing"                 # or: the key that RocketMQ clients sign with, together with
    access_secret = "..."                  # this secret, in plain text: a signature can't be checked by a hash
    roles = ["dashboards"]
    read = ["orders/#"]                    # as for a role
    write = ["invoices/#"]
    consume = ["billing", "audit-*"]
    admin = ["billing"]

The file holds hashes of tokens, not tokens; `printf %s TOKEN | sha256sum` makes one. A file with access secrets must be
readable by the node only. Health checks need no principal; reflection needs any.

A RocketMQ signature covers the time that the client states, and nothing else of the call (docs/transport.md of the RocketMQ
clients). The clients state their local time and call it UTC, so the node can't check the age of a signature. Anybody who reads
a signature on the network can therefore use it: use TLS.
"""

from __future__ import annotations

import tomllib
from collections import Counter
from pathlib import Path
from typing import Any, Final

from penstock.access.actions import ALL, GROUP_ACTIONS, TERMS, TOPIC_ACTIONS, actions_of
from penstock.access.errors import AccessInvalid
from penstock.access.policy import AccessPolicy, Grants, Principal, Role
from penstock.access.rule import Network, Rule, Who
from penstock.store import topics
from penstock.store.errors import TopicInvalid
from penstock.store.space.causer import plain_network

SHA256_DIGITS: Final = 64

_CREDENTIALS: Final = ("token_sha256", "certificate", "access_key", "access_secret")
_GRANTS: Final = ("read", "write", "consume", "admin")
_WHO: Final = ("users", "roles", "clients", "addresses")
_MOVED: Final = {
    "publish": "write, which covers MQTT as well",
    "mqtt_user": "a [[role]] with users and consume",
}
"""What earlier versions had in a principal, and what replaces it."""


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
    try:
        return _policy(document)
    except AccessInvalid as error:
        raise AccessInvalid(f"the access file {path}: {error}") from error


def _policy(document: dict[str, Any]) -> AccessPolicy:
    no_match = document.pop("no_match", "deny")
    if no_match not in ("allow", "deny"):
        raise AccessInvalid(f'no_match is {no_match!r}; write "allow" or "deny"')
    tables = {name: document.pop(name, []) for name in ("rule", "role", "principal")}
    for name, rows in tables.items():
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            raise AccessInvalid(f"{name} should be a list of tables, [[{name}]]")
    if document:
        raise AccessInvalid(f"has {', '.join(document)} where no_match, [[rule]], [[role]] or [[principal]] should be")
    rules = [_rule(f"rule {number}", row) for number, row in enumerate(tables["rule"], 1)]
    roles = [_role(row) for row in tables["role"]]
    principals = [_principal(row) for row in tables["principal"]]
    _check_unique("roles of one name", [role.name for role in roles])
    _check_unique("principals of one name", [principal.name for principal in principals])
    for credential in ("token_sha256", "certificate", "access_key"):
        _check_unique(f"principals of one {credential}", [getattr(one, credential) for one in principals])
    return AccessPolicy(rules, principals, roles, allows_unmatched=no_match == "allow")


def _check_unique(what: str, values: list[str]) -> None:
    for value, count in Counter(values).items():
        if value and count > 1:
            raise AccessInvalid(f"has two {what}, {value!r}")


# --- one entry --------------------------------------------------------------------------------------------------------


def _rule(where: str, row: dict[str, Any]) -> Rule:
    _check_known(where, row, ("allow", "deny", "topics", "groups", *_WHO))
    if ("allow" in row) == ("deny" in row):
        raise AccessInvalid(f"{where}: give either allow or deny")
    effect = "allow" if "allow" in row else "deny"
    lists = {name: _texts(where, row, name) for name in (effect, "topics", "groups", "users", "roles", "clients")}
    terms = lists[effect]
    unknown = [term for term in terms if term not in TERMS]
    if unknown or not terms:
        raise AccessInvalid(f"{where}: {effect} has {', '.join(map(repr, unknown)) or 'nothing'}; use {', '.join(TERMS)}")
    actions = actions_of(terms)
    for name, kinds in (("topics", TOPIC_ACTIONS), ("groups", GROUP_ACTIONS)):
        is_about = any(action in kinds for action in actions)
        if lists[name] and not is_about:
            raise AccessInvalid(
                f"{where}: {', '.join(terms)} is not about {name}; give {' or '.join(kinds)}, or leave {name} out"
            )
        if is_about and not lists[name] and not (ALL in terms and (lists["topics"] or lists["groups"])):
            raise AccessInvalid(f'{where}: give {name}, or ["{"#" if name == "topics" else "*"}"] for all of them')
    who = Who("", lists["users"], lists["roles"], lists["clients"], tuple(_networks(where, row)))
    _check_filters(where, lists["topics"])
    return Rule(where, effect == "allow", actions, who, lists["topics"], lists["groups"])


def _role(row: dict[str, Any]) -> Role:
    where = f"role {row.get('name', '')!r}"
    _check_known(where, row, ("name", "users", *_GRANTS))
    return Role(_name(where, row), _texts(where, row, "users"), _grants(where, row))


def _principal(row: dict[str, Any]) -> Principal:
    where = f"principal {row.get('name', '')!r}"
    for name in row.keys() & _MOVED.keys():
        raise AccessInvalid(f"{where}: {name} does not exist any more; give {_MOVED[name]}")
    _check_known(where, row, ("name", "roles", *_CREDENTIALS, *_GRANTS))
    texts = {name: row.get(name, "") for name in _CREDENTIALS}
    if not all(isinstance(value, str) for value in texts.values()):
        raise AccessInvalid(f"{where}: {', '.join(_CREDENTIALS)} must be text")
    token = texts["token_sha256"] = texts["token_sha256"].lower()
    if token and (len(token) != SHA256_DIGITS or not all(c in "0123456789abcdef" for c in token)):
        raise AccessInvalid(f"{where}: token_sha256 must have {SHA256_DIGITS} hexadecimal digits")
    if bool(texts["access_key"]) != bool(texts["access_secret"]):
        raise AccessInvalid(f"{where}: access_key and access_secret go together")
    return Principal(_name(where, row), **texts, roles=_texts(where, row, "roles"), grants=_grants(where, row))


# --- one value --------------------------------------------------------------------------------------------------------


def _check_known(where: str, row: dict[str, Any], known: tuple[str, ...]) -> None:
    unknown = [name for name in row if name not in known]
    if unknown:
        raise AccessInvalid(f"{where}: there is no {', '.join(unknown)}; use {', '.join(known)}")


def _name(where: str, row: dict[str, Any]) -> str:
    name = row.get("name")
    if not isinstance(name, str) or not name:
        raise AccessInvalid(f"{where}: name must be text and not be empty")
    return name


def _texts(where: str, row: dict[str, Any], name: str) -> tuple[str, ...]:
    """Return a list of texts, for which one text may stand by itself."""
    value = row.get(name, [])
    values = [value] if isinstance(value, str) else value
    if not isinstance(values, list) or not all(isinstance(each, str) and each for each in values):
        raise AccessInvalid(f"{where}: {name} must be a list of texts that are not empty")
    return tuple(values)


def _grants(where: str, row: dict[str, Any]) -> Grants:
    lists = {name: _texts(where, row, name) for name in _GRANTS}
    _check_filters(where, lists["read"] + lists["write"])
    return Grants(**lists)


def _check_filters(where: str, filters: tuple[str, ...]) -> None:
    for topic_filter in filters:
        try:
            topics.check_filter(topic_filter)
        except TopicInvalid as error:
            raise AccessInvalid(f"{where}: {error}") from error


def _networks(where: str, row: dict[str, Any]) -> list[Network]:
    try:
        return [plain_network(network) for network in _texts(where, row, "addresses")]
    except ValueError as error:
        raise AccessInvalid(f'{where}: addresses must be networks such as "10.0.0.0/8": {error}') from error
