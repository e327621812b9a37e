"""The options of access control."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.store.options import option


@dataclass(frozen=True, slots=True)
class AccessControlOptions:
    """The section `[access]`: who may do what, over MQTT and gRPC."""

    file: str = option(
        "",
        "TOML file with the rules, roles and principals: who may publish, subscribe, receive, send, pop, consume and "
        "administrate what. The guide Access control explains it. If empty, callers over gRPC may do everything, and over MQTT "
        "the plugins decide alone.",
    )
