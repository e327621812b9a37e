"""Options that a node no longer has, and what takes their place."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, Final

from penstock.store.durations import format_duration
from penstock.store.options import operator_name, options_of, unit_ms_of

_NEW_NAMES: Final = {
    "pop.tls_certificate_file": "pop.certificate_file",
    "pop.tls_key_file": "pop.key_file",
    "pop.tls_client_ca_file": "pop.client_ca_file",
    "replication.tls_cert_file": "replication.certificate_file",
    "replication.tls_key_file": "replication.key_file",
    "replication.tls_ca_file": "replication.ca_file",
    "replication.etcd_cert_file": "replication.etcd_certificate_file",
    **{
        f"{section}.{name}": f"{section}.{name}_file"
        for section in ("admin", "mqtt.listeners")
        for name in ("certificate", "key", "client_ca", "client_crl")
    },
}
"""The new name of each option that has only another name."""

REPLACEMENTS: Final = {
    **{old: f"say {new}" for old, new in _NEW_NAMES.items()},
    "clock.gap_max": "it is always 1d; penstock clock accept ends the wait after it",
    "store.copied_bytes_max": "it is always 16 GiB; retention waits while more is needed",
    "store.reserve_percent": "say store.reserve_bytes, of which a small disk keeps 5 percent",
    "mqtt.shared": "say mqtt.shared_max = 0 to switch shared subscriptions off",
    "mqtt.plain": 'say mqtt.listen = "off" for no such listener',
    "mqtt.check_payload_format": "the node stores payloads as they come, whatever their format",
    "access.jwt.key_file": "say access.jwt.keys",
    "access.jwt.jwks_file": "say access.jwt.keys",
    "access.jwt.jwks_url": "say access.jwt.keys",
    "replication.relay": "a node that follows always relays clients; let a load balancer ask /readyz to spare that",
    "mqtt.packet_bytes_max": "it follows from mqtt.message_bytes_max",
    "mqtt.tls_handshake_ms": "say mqtt.connect_timeout, which holds for the TLS handshake, too",
    "mqtt.all_subscriptions_max": "say mqtt.sessions_max, which allows ten subscriptions for each, or use [[quotas.limits]]",
    "mqtt.retained_bytes_max": "say mqtt.retained_max, which allows 4 KiB for each, or use [[quotas.limits]]",
    "mqtt.access.denied_subscription": "the reason is always 0x87",
    "mqtt.access.session_of_other": "the session of another user is always refused; mqtt.access.client_id binds ids to users",
    "mqtt.access.parallel": "a class whose plugins may run in parallel has runs_in_parallel = True",
    "mqtt.access.auth": "say mqtt.access.plugins, in which auth is a table",
    "mqtt.access.topic_check": "say mqtt.access.plugins, in which topic-check is a table",
    "mqtt.access.verified_ms": "it is always 15m",
    "pop.request_bytes_max": "say pop.message_bytes_max, four of which a request has room for",
    "pop.deduplication_topic_ids_max": "say pop.deduplication_ids_max, a fifth of which one topic may have",
    "pop.requests_bytes_max": "say pop.memory_bytes_max, an eighth of which is the size of all requests",
    "pop.responses_bytes_max": "say pop.memory_bytes_max, an eighth of which is the size of all responses",
    "pop.transaction_checks_max": "it is always 15; say pop.transaction_check, the time between two",
    "pop.transactions_max": "it is always 100000; [[quotas.limits]] bounds the share of a user",
    "quotas.tenant_separator": 'it is always "/"',
    "tracing.service_name": "it is always penstock; service.instance.id tells nodes apart",
    "timer.pending_bytes_max": "say timer.pending_max, which allows 4 KiB for each, or use [[quotas.limits]]",
    "timer.keys_max": "say timer.pending_max, a tenth of which may have keys, or use [[quotas.limits]]",
    "timer.schedules_bytes_max": "say timer.schedules_max, which allows 6 KiB for each, or use [[quotas.limits]]",
}
"""What to do without an option, if there is more to say than its constant value."""

_INDEX: Final = re.compile(r"\[\d+\]")


def describe_removed(name: str, sections: Mapping[str, Any]) -> str:
    """Return what takes the place of an option that the node no longer has; empty if it never had one of this name.

    The name of a duration with a unit anywhere in it counts as one that the node once had.

    Args:
        name: full name of the option, such as `store.retention_ms` or `mqtt.listeners[0].key`.
        sections: the options dataclass of each section.
    """
    known = _INDEX.sub("", name)
    if known in REPLACEMENTS:
        return REPLACEMENTS[known]
    section, _, field_name = known.rpartition(".")
    if section not in sections:
        return ""
    for option in options_of(sections[section]):
        if option.unit_ms and unit_ms_of(field_name) and operator_name(field_name) == option.name:
            example = option.written(option.default) or "7d"
            return f"say {section}.{option.name} with a unit, such as {option.name} = {json.dumps(example)}"
    for declared in fields(sections[section]):
        if field_name in (declared.name, operator_name(declared.name)) and "reason" in declared.metadata:
            constant: Any = declared.default
            unit_ms = unit_ms_of(declared.name)
            return f"it is always {format_duration(constant * unit_ms) if unit_ms else constant}"
    return ""
