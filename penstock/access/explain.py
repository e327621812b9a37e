"""Why somebody may do something or not, in words for an operator."""

from __future__ import annotations

from typing import Any

from penstock.access.actions import FILTER_ACTIONS, RECEIVE, SUBSCRIBE, TOPIC_ACTIONS
from penstock.access.policy import AccessPolicy
from penstock.access.rights import SHARE, Decision
from penstock.access.subject import Subject
from penstock.store import topics
from penstock.store.errors import TopicInvalid


def explained(policy: AccessPolicy, subject: Subject, action: str, name: str) -> dict[str, Any]:
    """Return `allowed`, and `why` as a sentence.

    Args:
        policy: decides.
        subject: who acts.
        action: one of `ACTIONS`.
        name: the topic, filter or group.
    """
    try:
        if action in (*FILTER_ACTIONS, RECEIVE):
            is_shared = action == SUBSCRIBE and name.startswith(SHARE)
            topics.check_filter(name.split("/", 2)[-1] if is_shared else name)
        elif action in TOPIC_ACTIONS:
            topics.check_topic(name.encode())
    except TopicInvalid as error:
        return {"allowed": False, "why": str(error)}
    rights = policy.rights_of(subject)
    is_wildcard = action == RECEIVE and topics.is_wildcard(name)  # everything that a subscription could match
    decision = rights.covers(action, name) if is_wildcard else rights.decide(action, name)
    roles = sorted(rights.subject.roles)
    found: dict[str, Any] = {"allowed": decision.is_allowed, "why": _why(decision, name)}
    if roles:
        found["roles"] = roles
    return found


def _why(decision: Decision, name: str) -> str:
    rule = decision.rule
    if rule is None:
        if decision.part:
            return f"{name!r} touches too many denied parts to decide"
        if decision.is_allowed:
            return 'no rule applies, and no_match is "allow"'
        return 'no rule, role or principal allows it, and no_match is "deny"'
    verb = "allows" if rule.is_allowing else "denies"
    where = ", ".join(rule.topics or rule.groups)
    part = f"; {name!r} and it share {decision.part!r}" if decision.part and decision.part != name else ""
    return f"{rule.source} {verb} it: {where}{part}"
