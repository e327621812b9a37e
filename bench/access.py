"""`python -m bench access`: what access control costs, for each decision and for each published message.

The rows `everybody` and `users` measure decisions by the rules of the access file, without a network. The topics are drawn at
random among many, so that no decision is one that was made just before. Nothing is remembered between decisions: the gateway's
memory of decided topics is not measured.

The rows `publish` and `publish-topics` measure three nodes in turn: one without access control, one with a password file and
rules with `%u`, and one with amqtt's plugins for passwords and topics. The figures are processor time of the node for a
message, so whatever else the machine does hardly counts. The logins are over before, but the connections are in the figures.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Generator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Final

from argon2 import PasswordHasher

from bench.load import Load, LoadFailed, LoadUnavailable, run_load
from bench.peers import BrokerFailed, penstock, processor_s
from bench.rows import Figures, Goal, Row, RowFailed, Setting, parser_of, run
from penstock.access.actions import PUBLISH, SUBSCRIBE, TERMS
from penstock.access.policy import AccessPolicy
from penstock.access.rule import Rule, Who
from penstock.access.subject import Subject

RULES = 10_000
DECISIONS = 20_000
ASKED = 5_000
"""Different topics or filters."""


def _us(decide: Callable[[str], object], asked: list[str], setting: Setting) -> float:
    """Return the microseconds of processor time of a decision."""
    count = setting.count(DECISIONS, 200)
    chosen = random.Random(1).choices(asked, k=count)
    began = time.process_time()
    for name in chosen:
        decide(name)
    return (time.process_time() - began) / count * 1e6


def _of_everybody(setting: Setting) -> Generator[Figures]:
    """Rules that apply to everybody: 10,000 filters in one trie, every tenth of which denies."""
    sites, rules = setting.count(RULES, 100), []
    for site in range(sites):
        kinds = (f"plant/{site}/+/temperature", f"plant/{site}/line/#", f"plant/{site}/%u/#", f"+/{site}/status")
        rules.append(Rule(f"rule {site}", site % 10 > 0, TERMS["all"], topics=(kinds[site % 4],)))
    rights = AccessPolicy(rules).rights_of(Subject("ann"))
    topics = [f"plant/{number % sites}/line/{number}" for number in range(ASKED)]
    filters = [f"plant/{number % sites}/line/+" for number in range(ASKED)]
    while True:
        yield {
            "topic": _us(lambda name: rights.may(PUBLISH, name), topics, setting),
            "filter": _us(lambda name: rights.may(SUBSCRIBE, name), filters, setting),
            "widest": _us(lambda name: rights.may(SUBSCRIBE, name), ["#", "plant/#", "+/+/#"], setting),
        }


def _of_users(setting: Setting) -> Generator[Figures]:
    """A rule for each of 10,000 users: what a client costs when it connects, and each decision afterwards."""
    users = setting.count(RULES, 100)
    rules = [Rule(f"rule {user}", True, TERMS["all"], Who(users=(f"user-{user}",)), (f"u/{user}/#",)) for user in range(users)]
    policy = AccessPolicy(rules)
    rights = policy.rights_of(Subject("user-7"))
    names = [f"user-{number % users}" for number in range(ASKED)]
    topics = [f"u/7/{number}" for number in range(ASKED)]
    while True:
        yield {
            "connect": _us(lambda name: policy.rights_of(Subject(name)), names, setting),
            "own_topic": _us(lambda name: rights.may(PUBLISH, name), topics, setting),
        }


# --- publishing -------------------------------------------------------------------------------------------------------

USER: Final = "bench"
"""User name and password of the load."""
BY_RULES: Final = """
[access]
file = "{directory}/access.toml"
password_file = "{directory}/passwords"
"""
RULES_FILE: Final = """
[[rule]]
deny = ["publish"]
topics = ["hr/#"]

[[rule]]
allow = ["publish"]
topics = ["%u/#"]
"""
BY_PLUGIN: Final = """
[mqtt.access.plugins."amqtt.plugins.authentication.FileAuthPlugin"]
password_file = "{directory}/passwords"
[mqtt.access.plugins."amqtt.plugins.topic_checking.TopicAccessControlListPlugin"]
publish_acl = {{ bench = ["bench/#"] }}
"""
CHEAP: Final = PasswordHasher(time_cost=1, memory_cost=64, parallelism=1)
"""Makes hashes that cost little: `bench storm` measures logins."""
CONFIGS: Final = {"none": "", "rules": BY_RULES, "plugin": BY_PLUGIN}


def _publish(row: str, load: Load, setting: Setting) -> Generator[Figures]:
    """Put a load on three nodes in turn: without access control, with the built-in one, and with plugins."""
    load = replace(load, msgs=setting.count(load.msgs, load.msgs // 50), login=1)
    directory = setting.fresh()
    (directory / "access.toml").write_text(RULES_FILE)
    (directory / "passwords").write_text(f"{USER}:{CHEAP.hash(USER)}\n")
    with ExitStack() as stack:
        nodes = {}
        for name, text in CONFIGS.items():
            config = directory / f"{name}.toml"
            config.write_text(text.format(directory=directory))
            start = partial(penstock, setting.fresh(), "--config", str(config))
            nodes[name] = stack.enter_context(setting.broker(name, start))
        for node in nodes.values():
            run_load(node.host, node.port, Load(qos=1, msgs=1, login=1))  # the node remembers the password from here on
            run_load(node.host, node.port, load)
        for order in itertools.cycle((tuple(nodes), tuple(reversed(nodes)))):
            us = {}
            for name in order:
                node = nodes[name]
                began_s = processor_s(node.pid)
                result = run_load(node.host, node.port, load)
                us[name] = (processor_s(node.pid) - began_s) / result.msgs * 1e6
                if missing := result.missing(load):
                    raise RowFailed(f"{missing:,} of {result.msgs:,} messages are missing with access control {name!r}")
            more = {f"{name}_more": (us[name] / us["none"] - 1) * 100 for name in ("rules", "plugin")}
            yield {f"{row}_{figure}": value for figure, value in (us | more).items()}


def _publish_goals(row: str, what: str) -> tuple[Goal, ...]:
    return (
        Goal(f"{row}_none", f"{what}: processor time of a message without access control", "us"),
        Goal(f"{row}_rules", "... with a password file and rules", "us"),
        Goal(f"{row}_plugin", "... with amqtt's plugins", "us"),
        Goal(f"{row}_rules_more", "more with rules than without", "%", 5, is_most=True),
        Goal(f"{row}_plugin_more", "more with plugins than without", "%"),
    )


ROWS: dict[str, Row] = {
    "publish": Row(
        partial(_publish, "publish", Load(pubs=100, qos=1, window=20, topics=100, msgs=300_000)),
        _publish_goals("publish", "100 publishers, QoS 1, window 20, 100 topics in turn"),
    ),
    "publish-topics": Row(
        partial(_publish, "publish-topics", Load(pubs=10, qos=1, window=20, topics=2_000, msgs=100_000)),
        _publish_goals("publish-topics", "10 publishers, QoS 1, window 20, 2,000 topics in turn"),
    ),
    "everybody": Row(
        _of_everybody,
        (
            Goal("topic", f"decision on a topic, {RULES:,} rules for everybody", "us", 10, is_most=True),
            Goal("filter", "... on a filter", "us", 20, is_most=True),
            Goal("widest", "... on filters that touch all rules", "us", 100, is_most=True),
        ),
    ),
    "users": Row(
        _of_users,
        (
            Goal("connect", f"rights of a client that connects, {RULES:,} rules for one user each", "us", 50, is_most=True),
            Goal("own_topic", "... decision on a topic", "us", 10, is_most=True),
        ),
    ),
}


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark and return the exit status."""
    parser = parser_of("access", "Measure what access control costs.", ROWS)
    return run(parser, ROWS, arguments, failures=(BrokerFailed, LoadFailed, LoadUnavailable))
