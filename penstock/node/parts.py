"""The store of a data directory with all parts of a node: what is recovered, what the index follows from, and what fires."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from penstock.gateway.delivery.retained_messages import RetainedMessages
from penstock.gateway.sessions.stored_sessions import StoredSessions
from penstock.node.config import Config
from penstock.pop.core.core import PopCore
from penstock.pop.core.handle import Handles, load_secret
from penstock.pop.core.poptraces import PopTraces
from penstock.pop.core.sender import Sender, cancel_replaced
from penstock.pop.core.sentids import SentIds
from penstock.pop.core.transactions import Transactions
from penstock.store.clock import SteerableClock
from penstock.store.store import THIS_PLATFORM, Platform, Store
from penstock.timer.delayed import DelayedMessages
from penstock.timer.keys import TimerKeys
from penstock.timer.schedules import Schedules
from penstock.timer.upgrade import upgrade_from_17
from penstock.tracing.traces import Traces


class NodeParts:
    """The store and the parts on one data directory. The caller calls `store.recover`, and then `start`.

    Parameters:
        config: all options.
        clock: source of time.
        traces: makes spans; None without tracing.
        platform: see `Store`.

    Raises:
        Whatever `Store` raises.
    """

    def __init__(
        self,
        config: Config,
        clock: SteerableClock,
        *,
        traces: Traces | None = None,
        platform: Platform = THIS_PLATFORM,
    ) -> None:
        self.store = Store(
            config.data_dir,
            config.store,
            clock,
            clock_options=config.clock,
            quotas=config.quotas,
            platform=platform,
            upgrade=upgrade_from_17,
        )
        self.delayed = DelayedMessages(self.store, config.timer)
        self.timer_keys = TimerKeys(self.store, config.timer)
        self.schedules = Schedules(self.store, config.timer)
        self.retained = RetainedMessages(self.store.now_of, self.store.ledger)
        self.handles = Handles(load_secret(config.data_dir, files=platform.files, is_log_empty=not self.store.log.end))
        self.pop_traces = PopTraces(traces, self.store.when_durable) if traces is not None else None
        self.pop = PopCore(self.store, self.handles, config.pop, config.timer, self.pop_traces)
        self.transactions = Transactions(self.store, config.pop, config.timer)
        self.sent_ids = SentIds(self.store, config.pop)
        self.sessions = StoredSessions(self.store.queues, self.store.ledger)
        timed = (self.delayed, self.timer_keys, self.schedules, self.transactions)
        for part in (*timed, self.retained, self.sent_ids, self.sessions, self.pop.part):
            self.store.add_part(part)
        self.sender = Sender(
            self.store,
            self.handles,
            self.delayed,
            self.timer_keys,
            self.transactions,
            self.sent_ids,
            config.pop,
            self.pop_traces,
        )

    def start(self, loop: asyncio.AbstractEventLoop, store_failed: Callable[[OSError], None]) -> None:
        """Sync the log on `loop`, and fire what is due.

        Args:
            loop: runs the node.
            store_failed: see `Store.start`.
        """
        self.store.start(loop, store_failed)
        self.fire(loop)

    def fire(self, loop: asyncio.AbstractEventLoop) -> None:
        """Fire what is due on `loop`, from now on. The store must have caught up, and have been started."""
        cancel_replaced(self.timer_keys, self.delayed, self.store.space)  # before anything fires
        self.delayed.start(loop)
        self.schedules.start(loop)
        self.transactions.start(loop)
        self.pop.start(loop)

    def stop(self) -> None:
        """Fire nothing more. The caller closes the store."""
        self.pop.stop()
        self.transactions.stop()
        self.schedules.stop()
        self.delayed.stop()
