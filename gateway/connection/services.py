"""The parts of the gateway that all connections share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from penstock.gateway.connection.backpressure import Backpressure
    from penstock.gateway.connection.close_log import CloseLog
    from penstock.gateway.connection.disk_full import DiskFullBacklog
    from penstock.gateway.connection.handshake import Handshake
    from penstock.gateway.connection.open_connections import OpenConnections
    from penstock.gateway.connection.publish_fast_path import PublishFastPath
    from penstock.gateway.connection.subscribing import Subscribing
    from penstock.gateway.connection.throttle import Throttle
    from penstock.gateway.counters import GatewayCounters, Traffic
    from penstock.gateway.delivery.mqtttraces import MqttTraces
    from penstock.gateway.delivery.retained_messages import RetainedMessages
    from penstock.gateway.delivery.share_settlements import ShareSettlements
    from penstock.gateway.options import GatewayOptions
    from penstock.gateway.sessions.journal import SessionJournal
    from penstock.gateway.sessions.lifecycle import SessionLifecycle
    from penstock.gateway.transport.overtime import Overtime
    from penstock.pop.core.handle import Handles
    from penstock.store.store import Store
    from penstock.timer.delayed import DelayedMessages


@dataclass(frozen=True, slots=True)
class ConnectionServices:
    """The parts of the gateway that all connections share. The gateway makes it once, when it starts."""

    options: GatewayOptions
    """The section `[mqtt]`."""
    delay_ms_max: int
    """See `TimerOptions.delay_ms_max`."""
    loop: asyncio.AbstractEventLoop
    """The event loop."""
    now_s: Callable[[], float]
    """Returns the monotonic time in seconds."""
    store: Store
    """The store, which takes the messages."""
    delayed: DelayedMessages
    """The delayed messages, of which there is a limited number."""
    retained: RetainedMessages
    """The retained messages, of which there is a limited number."""
    handles: Handles
    """Makes the handles that cancel delayed messages."""
    connections: OpenConnections
    """All connections that are open."""
    handshake: Handshake
    """Accepts and refuses CONNECTs."""
    lifecycle: SessionLifecycle
    """Keeps or ends the session of a client that leaves."""
    journal: SessionJournal
    """Records the progress of sessions."""
    subscribing: Subscribing
    """Answers SUBSCRIBEs and UNSUBSCRIBEs."""
    settlements: ShareSettlements
    """Settles the deliveries of shared subscriptions."""
    fast_path: PublishFastPath
    """Takes reads that are nothing but plain PUBLISHes."""
    backlog: DiskFullBacklog
    """Bounds what all connections keep while the disk is full."""
    backpressure: Backpressure
    """Pauses publishers while the disk is behind."""
    throttle: Throttle
    """Pauses clients that exceed their rate."""
    overtime: Overtime
    """Bounds what is handled in one turn of the loop."""
    close_log: CloseLog
    """Logs and counts the connections that the server closes."""
    counters: GatewayCounters
    """Counts packets and messages."""
    traffic: Traffic
    """Counts packets by type, and connections by listener."""
    traces: MqttTraces | None
    """Makes spans of PUBLISHes and acks; None without tracing."""
