"""What `penstock top` asks a node for each view."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Final

import orjson

from penstock.cli.adminclient import AdminClient
from penstock.cli.apiclient import PREFIX
from penstock.cli.endpoint import Endpoint
from penstock.cli.nodeview import Scrape

CLIENTS: Final = 20
"""Clients that a view has at most."""


@dataclass(frozen=True, slots=True)
class NodeAnswers:
    """What a node says of itself at one time."""

    scrape: Scrape
    is_ready: bool
    """Whether it accepts clients."""
    drain: dict[str, Any] | None
    """How far it has drained, if it is not ready; None if it does not say."""
    busiest: list[dict[str, Any]] | None
    """The clients with the highest rates; None if the node does not say, or knows no rates yet."""


def ask(client: AdminClient, node: Endpoint, order: str) -> NodeAnswers:
    """Return the answers of a node.

    Args:
        client: asks.
        node: its admin listener.
        order: the rate by which clients are the busiest.

    Raises:
        ConnectionError: it does not answer, or is no node.
        PermissionError: it does not show its metrics to whoever asks.
    """
    at_s = time.monotonic()
    status, body = client.get("/metrics")
    ready, _ = client.get("/readyz")
    try:
        scrape = Scrape.parse(body.decode(), at_s)
    except ValueError as error:
        raise ConnectionError(f"What {node.address} shows at /metrics can't be read: {error}.") from error
    if status != HTTPStatus.OK or "penstock_log_end_bytes" not in scrape.samples:
        raise ConnectionError(f"The HTTP server on {node.address} is no Penstock node: give --admin the node's admin.listen.")
    is_ready = ready == HTTPStatus.OK
    busiest = _read(client, f"/clients?order={order}&limit={CLIENTS}")
    return NodeAnswers(
        scrape,
        is_ready,
        None if is_ready else _read(client, "/drain"),
        None if busiest is None or busiest["rates_over_ms"] is None else list(map(_client, busiest["items"])),
    )


def _read(client: AdminClient, path: str) -> dict[str, Any] | None:
    """Return what the API answers; None where a caller may not ask, or an older node does not know the question."""
    try:
        status, body = client.get(PREFIX + path)
    except PermissionError:
        return None
    if status != HTTPStatus.OK:
        return None
    answer: dict[str, Any] = orjson.loads(body)
    return answer


def _client(shown: Mapping[str, Any]) -> dict[str, Any]:
    return {**{name: shown[name] for name in ("client_id", "user", "address")}, **shown["rates"]}
