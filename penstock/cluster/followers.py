"""The connections that other replicas have dialled: followers of a leader, and clients that followers relay."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.cluster.bootstrap import SnapshotSending
from penstock.cluster.errors import RelayRefused, StreamBroken
from penstock.cluster.frames import Frame, FrameKind, HelloPayload, RelayPayload, WelcomePayload
from penstock.cluster.framestream import FrameStream
from penstock.cluster.logsending import LogSending
from penstock.cluster.replica import ReplicaRole
from penstock.cluster.roles import Roles
from penstock.cluster.shardkey import ReplicaId, name_of
from penstock.cluster.splice import End, splice
from penstock.store.retention.retention import Blocker
from penstock.store.store import Store

if TYPE_CHECKING:
    from penstock.cluster.member import Member

logger = logging.getLogger(__name__)

HEARTBEAT_MS = 100
"""After this time without a frame a leader sends a heartbeat."""
HELLO_MS = 5_000
"""After this time a connection whose other end has not said who it is ends."""
CONNECTIONS_MAX = 64
"""Connections of replicas that are taken at a time. A shard has a few replicas."""
HOLD_S = 60.0
"""How long the begin of the log stays after a follower has got the snapshot there. Meanwhile it starts again."""


class _Refusing:
    """Ends a connection with its first frame."""

    def received(self, stream: FrameStream, frame: Frame) -> None:
        raise StreamBroken(f"{CONNECTIONS_MAX} other connections are open")

    def ended(self, stream: FrameStream) -> None:
        pass


class Followers:
    """The connections that others have dialled.

    Parameters:
        owner: the member.
        cluster: its cluster.
        data_dir: of the store.
        store: has the log.
        roles: the node.
    """

    def __init__(self, owner: Member, cluster: str, data_dir: Path, store: Store, roles: Roles) -> None:
        self._owner = owner
        self._cluster = cluster
        self._data_dir = data_dir
        self._store = store
        self._roles = roles
        self._links = 0
        self._taken: dict[int, FrameStream] = {}
        """Connections, by number."""
        self._sendings: dict[int, LogSending] = {}
        """What is sent over them, to followers that are welcome."""
        self._snapshots: dict[int, SnapshotSending] = {}
        """Snapshots that are sent over them, to followers whose log ends before this one begins."""
        self._relayed: set[End] = set()
        """Connections of clients that followers relay."""

    @property
    def relayed(self) -> int:
        """How many clients this replica serves that have connected to a follower."""
        return len(self._relayed)

    def successor(self, wanted: ReplicaId | None = None) -> ReplicaId | None:
        """Return the wanted follower, or the one that has most of the log; None if none is in the set and connected."""
        key = self._owner.core.key
        members = key.members if key is not None else frozenset()
        found = [each for each in self._sendings.values() if each.replica in members and wanted in (None, each.replica)]
        return max(found, key=lambda each: each.acked).replica if found else None

    def state(self) -> list[dict[str, Any]]:
        """Return what a leader knows of the followers that are connected: their lag, and for how many ms they were silent."""
        core, now_ms = self._owner.core, self._owner.now_ms()
        return [
            {
                "replica": name_of(each.replica),
                "address": each.stream.peer,
                "lag_bytes": each.lag_bytes,
                "lag_ms": core.lag_ms(now_ms, each.replica),
                "silent_ms": now_ms - each.stream.received_ms,
            }
            for each in self._sendings.values()
        ]

    # --- connections ------------------------------------------------------------------------------------------------

    def take(self) -> FrameStream:
        """Return the protocol of a connection that was dialled."""
        self._links += 1
        if len(self._taken) >= CONNECTIONS_MAX:
            return FrameStream(_Refusing(), self._links, self._owner.now_ms)
        self._taken[self._links] = stream = FrameStream(self, self._links, self._owner.now_ms)
        return stream

    def tick(self, now_ms: int) -> None:
        """Send heartbeats, and end connections whose other end keeps silent."""
        core = self._owner.core
        if core.role is ReplicaRole.LEADING:
            for sending in self._sendings.values():
                sending.tell_start()
                if now_ms - sending.stream.sent_ms >= HEARTBEAT_MS:
                    sending.stream.send(FrameKind.HEARTBEAT, core.epoch, sending.sent, core.committed)
        for number, stream in list(self._taken.items()):
            snapshot = self._snapshots.get(number)
            if snapshot is not None:
                is_late = snapshot.is_silent(now_ms)
            else:
                is_late = number not in self._sendings and now_ms - stream.made_ms >= HELLO_MS
            if is_late:
                stream.abort()
                del self._taken[number]
                self._end_snapshot(number)

    def end_all(self) -> None:
        """End all connections at once."""
        for stream in self._taken.values():
            stream.abort()
        for end in self._relayed:
            end.abort()
        for snapshot in self._snapshots.values():
            snapshot.close()
        self._taken.clear()
        self._sendings.clear()
        self._snapshots.clear()

    def received(self, stream: FrameStream, frame: Frame) -> None:
        """Take a frame. Raises StreamBroken."""
        number, owner = stream.number, self._owner
        if self._taken.get(number) is not stream:
            return
        sending = self._sendings.get(number)
        if frame.kind is FrameKind.ACK and sending is not None:
            sending.acknowledged(frame.position)
            args = sending.replica, number, frame.epoch, frame.position, frame.stamp
            owner.do(owner.core.peer_acked(owner.now_ms(), *args))
        elif frame.kind is FrameKind.ACK and number in self._snapshots:
            self._snapshots[number].acknowledged(frame.position)
        elif frame.kind is FrameKind.HELLO and sending is None:
            hello = HelloPayload.decoded(frame.payload)
            why = self._objection(hello)
            if why:
                self.refuse(number, why)
                return
            owner.do(owner.core.hello(owner.now_ms(), hello.replica, number, frame.epoch, hello.epochs, frame.position))
        elif frame.kind is FrameKind.RELAY and sending is None:
            client = RelayPayload.decoded(frame.payload)
            why = self._objection(client) or ("" if owner.is_serving else "this replica does not lead")
            if why:
                self.refuse(number, why)
                return
            del self._taken[number]
            owner.run(self._serve(stream, client))
        else:
            raise StreamBroken(f"a frame {frame.kind.name} came from a follower at the wrong time")

    def ended(self, stream: FrameStream) -> None:
        """Take that a connection has ended."""
        number, owner = stream.number, self._owner
        if self._taken.get(number) is not stream:
            return
        del self._taken[number]
        self._end_snapshot(number)
        sending = self._sendings.pop(number, None)
        if sending is not None:
            owner.do(owner.core.peer_gone(owner.now_ms(), sending.replica, number))

    def refuse(self, number: int, why: str) -> None:
        """Tell the other end of a connection why it ends, and end it."""
        stream = self._taken.pop(number, None)
        if stream is not None:
            stream.refuse(self._owner.core.epoch, why)

    def _objection(self, first: HelloPayload | RelayPayload) -> str:
        own = name_of(self._owner.id)
        if first.cluster != self._cluster:
            return f"this is a replica of cluster {self._cluster!r}, not of {first.cluster!r}; check replication.cluster"
        if first.to != self._owner.id:
            return f"this is replica {own}, not {name_of(first.to)}; the address of the other one may be old"
        if isinstance(first, HelloPayload) and first.replica == self._owner.id:
            return f"this replica has the id {own} too: a data directory was copied"
        return ""

    # --- followers --------------------------------------------------------------------------------------------------

    def welcome(self, peer: ReplicaId, number: int, epoch: int, position: int, committed: int) -> None:
        """Send a follower the log from where both agree, or a snapshot if the log begins later."""
        stream, log, owner = self._taken.get(number), self._store.log, self._owner
        if stream is None:
            return
        if position < log.start:
            owner.do(owner.core.peer_gone(owner.now_ms(), peer, number))
            self._send_snapshot(peer, stream, epoch)
            return
        for earlier, other in list(self._sendings.items()):
            if other.replica == peer:
                other.stream.abort()
                del self._sendings[earlier]
                self._taken.pop(earlier, None)
        stream.trust()
        payload = WelcomePayload(owner.log.epochs, self._roles.secret).encoded()
        stream.send(FrameKind.WELCOME, epoch, position, committed, payload=payload)
        sending = LogSending(peer, stream, log, owner.log, epoch, position, lambda: owner.core.committed)
        self._sendings[number] = sending
        sending.go_on()

    def written(self, position: int, data: bytes) -> None:
        """Send what was just written to the log."""
        for sending in self._sendings.values():
            sending.written(position, data)

    def resign(self, successor: ReplicaId) -> None:
        """Tell all followers that the leader resigns, and who should stand first."""
        core = self._owner.core
        for sending in self._sendings.values():
            sending.stream.send(FrameKind.RESIGN, core.epoch, successor, core.committed)

    def _send_snapshot(self, peer: ReplicaId, stream: FrameStream, epoch: int) -> None:
        """Send the snapshot at the beginning of the log, which stays until the follower has had time to come back."""
        start, retention, call_soon = self._store.log.start, self._store.retention, asyncio.get_running_loop().call_soon
        try:
            sending = SnapshotSending(peer, stream, self._data_dir, start, epoch, call_soon)
            self._snapshots[stream.number] = sending
            retention.holds.add(Blocker.FOLLOWER)
            logger.info("replica %s gets the snapshot at position %d", name_of(peer), start)
            sending.go_on()
        except OSError as error:
            self.refuse(stream.number, f"the snapshot at {start} can't be read: {error}")
            self._end_snapshot(stream.number)

    def _end_snapshot(self, number: int) -> None:
        sending = self._snapshots.pop(number, None)
        if sending is not None:
            sending.close()
            asyncio.get_running_loop().call_later(HOLD_S, self._let_go)

    def _let_go(self) -> None:
        if not self._snapshots:
            self._store.retention.holds.discard(Blocker.FOLLOWER)

    # --- clients ----------------------------------------------------------------------------------------------------

    async def _serve(self, stream: FrameStream, client: RelayPayload) -> None:
        """Serve a client whose connection a follower relays. It has no part in replication any more."""
        epoch = self._owner.core.epoch
        try:
            inner = await self._roles.serve(client)
        except RelayRefused as error:
            stream.refuse(epoch, str(error))
            return
        end = End(lambda: self._relayed.discard(end))
        await asyncio.get_running_loop().create_unix_connection(lambda: end, sock=inner)
        self._relayed.add(end)
        if stream.has_ended or not self._owner.is_serving:
            end.abort()
            stream.abort()
            return
        stream.send(FrameKind.RELAYED, epoch, 0)
        relaying = End()
        rest = stream.hand_over(relaying)
        splice(end, relaying)
        end.write(rest)
