"""`python -m bench access`: the cost of a decision by the rules of the access file, without a network.

The topics are drawn at random among many, so that no decision is one that was made just before. Nothing is remembered between
decisions: the gateway's memory of decided topics is not measured.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Generator

from bench.rows import Figures, Goal, Row, Setting, parser_of, run
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


ROWS: dict[str, Row] = {
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
    return run(parser_of("access", "Measure decisions by the rules of the access file.", ROWS), ROWS, arguments)
