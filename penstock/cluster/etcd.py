"""etcd as the coordinator: version 3.4 or later."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from contextlib import suppress
from random import SystemRandom
from typing import Any, Final

import grpc.aio

from penstock.cluster.coordinator import Answer, Observer, ReplicaStatus
from penstock.cluster.errors import KeyInvalid
from penstock.cluster.etcdcalls import LEASE_GRANT, LEASE_KEEP_ALIVE, LEASE_REVOKE, RANGE, TXN, EtcdCalls, EtcdRefused
from penstock.cluster.options import EtcdOptions
from penstock.cluster.proto import etcd_pb2 as pb
from penstock.cluster.shardkey import ABSENT, ReplicaId, ShardKey, name_of, replica_named
from penstock.store.topics import excerpt

logger = logging.getLogger(__name__)

LEASE_S = 1
"""How long etcd should remember a replica that says nothing. etcd makes it longer where its elections take longer."""
KEEP_ALIVES = 3
"""How often a replica says that it is alive within that time."""
TWIN_LEASES = 5
"""After so many times that time another process with the same replica id is not one that has just ended."""
PROGRESS_S = 0.5
"""After this time without a word a watch is asked whether it goes on."""
WATCH_SILENCE_S = 1.5
"""After this time without a word a watch is begun anew, at another member."""
AGAIN_S = 0.1
"""Pause before something that failed is tried again."""


class EtcdCoordinator:
    """The keys of a cluster in etcd. It satisfies `Coordinator`.

    Parameters:
        options: where etcd is.
        cluster: name of the cluster. All its keys begin with `/penstock/NAME/`.
        replica: whose status is announced.
    """

    def __init__(self, options: EtcdOptions, cluster: str, replica: ReplicaId) -> None:
        self._calls = EtcdCalls(options)
        self._prefix: Final = f"/penstock/{cluster}/".encode()
        self._shard_key: Final = self._prefix + b"shard/0"
        self._alive_prefix: Final = self._prefix + b"alive/"
        self._alive_key: Final = self._alive_prefix + name_of(replica).encode()
        self._status: ReplicaStatus
        self._observer: Observer
        self._tasks: list[asyncio.Task[None]] = []
        self._lease = 0
        """The lease of this replica's status; 0 if it has none."""
        self._alive_revision = 0
        """Revision of this replica's status, as far as it knows."""
        self._twin_since_s: float | None = None
        self._alive: dict[ReplicaId, ReplicaStatus] = {}
        self._invalid = ""

    @property
    def problem(self) -> str:
        """Why the last calls had no answer; empty if the last one had one."""
        return self._calls.problem or self._invalid

    def start(self, observer: Observer, status: ReplicaStatus) -> None:
        """Begin to say that this replica is alive, and to tell the observer what becomes of the keys."""
        self._observer, self._status = observer, status
        for each in (self._keep_alive, self._keep_watch):
            self._tasks.append(asyncio.get_running_loop().create_task(self._again_and_again(each)))

    def announce(self, status: ReplicaStatus) -> None:
        """Say something else of this replica from now on. It is sent with the next sign of life."""
        self._status = status

    async def close(self) -> None:
        """End all calls, and say no longer that this replica is alive."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        if self._lease:
            with suppress(EtcdRefused):  # The lease has ended already.
                await self._calls.call(LEASE_REVOKE, pb.LeaseRevokeRequest(ID=self._lease))
        await self._calls.close()

    async def _again_and_again(self, once: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run something for ever. It returns or raises when something has failed."""
        while True:
            try:
                await once()
            except EtcdRefused:
                pass  # `EtcdCalls.problem` says why.
            except grpc.aio.AioRpcError as error:
                logger.debug("a watch ended: %s", error.details())
            except asyncio.InvalidStateError:
                logger.debug("a watch ended before it was written to")
            await asyncio.sleep(AGAIN_S)

    async def look(self) -> tuple[ShardKey, dict[ReplicaId, ReplicaStatus]] | None:
        """Return the key and which replicas are alive, or None if there is no answer. For commands: it watches nothing."""
        end = self._prefix[:-1] + bytes([self._prefix[-1] + 1])
        try:
            found = await self._calls.call(RANGE, pb.RangeRequest(key=self._prefix, range_end=end))
        except EtcdRefused:
            return None
        if found is None:
            return None
        key = self._key_of([kv for kv in found.kvs if kv.key == self._shard_key])
        alive: dict[ReplicaId, ReplicaStatus] = {}
        for kv in found.kvs:
            replica = self._replica_of(kv.key)
            status = self._status_of(kv.value) if replica is not None else None
            if replica is not None and status is not None:
                alive[replica] = status
        return None if key is None else (key, alive)

    # --- the key of the shard ---------------------------------------------------------------------------------------

    async def read(self) -> ShardKey | None:
        """Return the key as it was at some time during the call, or None if there is no answer."""
        try:
            found = await self._calls.call(RANGE, pb.RangeRequest(key=self._shard_key))
        except EtcdRefused:
            return None
        return None if found is None else self._key_of(found.kvs)

    async def swap(self, key: ShardKey) -> Answer | None:
        """Replace the key if it still has the revision `key.revision`, which is 0 for one that does not exist."""
        try:
            answer = await self._put_if(self._shard_key, key.encoded(), key.revision)
        except EtcdRefused:
            return None
        if answer is None:
            return None
        if answer.succeeded:
            return Answer(True, key._replace(revision=answer.header.revision))
        found = self._key_of(answer.responses[0].response_range.kvs)
        return None if found is None else Answer(False, found)

    def _key_of(self, kvs: Any) -> ShardKey | None:
        if not kvs:
            return ABSENT
        try:
            key = ShardKey.decoded(kvs[0].value, kvs[0].mod_revision)
        except KeyInvalid as error:
            self._is_invalid(error)
            return None
        self._invalid = ""
        return key

    def _is_invalid(self, error: KeyInvalid) -> None:
        if self._invalid != str(error):
            self._invalid = str(error)
            logger.error("%s", error)

    async def _put_if(self, key: bytes, value: bytes, revision: int, lease: int = 0) -> pb.TxnResponse | None:
        """Put a value if the key still has a revision. Otherwise the answer has the key. Raises EtcdRefused."""
        return await self._calls.call(
            TXN,
            pb.TxnRequest(
                compare=[pb.Compare(target=pb.Compare.MOD, key=key, mod_revision=revision)],
                success=[pb.RequestOp(request_put=pb.PutRequest(key=key, value=value, lease=lease))],
                failure=[pb.RequestOp(request_range=pb.RangeRequest(key=key))],
            ),
        )

    # --- who is alive -----------------------------------------------------------------------------------------------

    async def _keep_alive(self) -> None:
        """Hold a lease until it is lost. Raises EtcdRefused."""
        lease = SystemRandom().randrange(1, 1 << 63)
        granted = await self._calls.call(LEASE_GRANT, pb.LeaseGrantRequest(TTL=LEASE_S, ID=lease))
        if granted is None:
            return
        self._lease, ttl_s, said = lease, granted.TTL, None
        try:
            while True:
                status = self._status
                if status != said and await self._say(status, lease, ttl_s):
                    said = status
                answer = await self._calls.call(LEASE_KEEP_ALIVE, pb.LeaseKeepAliveRequest(ID=lease))
                if answer is not None and answer.TTL <= 0:
                    return
                await asyncio.sleep(ttl_s / KEEP_ALIVES if answer is not None else AGAIN_S)
        except EtcdRefused:
            self._lease = 0
            raise

    async def _say(self, status: ReplicaStatus, lease: int, ttl_s: int) -> bool:
        """Put the status, if no other process has put its own there. Raises EtcdRefused."""
        answer = await self._put_if(self._alive_key, status.encoded(), self._alive_revision, lease)
        if answer is None:
            return False
        if answer.succeeded:
            self._alive_revision, self._twin_since_s = answer.header.revision, None
            return True
        kvs = answer.responses[0].response_range.kvs
        other = self._status_of(kvs[0].value) if kvs else None
        if kvs and other is not None and other.instance != status.instance:
            now_s = asyncio.get_running_loop().time()
            self._twin_since_s = now_s if self._twin_since_s is None else self._twin_since_s
            if now_s - self._twin_since_s >= TWIN_LEASES * ttl_s:
                self._observer.twin_seen(other)
            return False
        self._alive_revision = kvs[0].mod_revision if kvs else 0
        return False

    def _status_of(self, value: bytes) -> ReplicaStatus | None:
        try:
            return ReplicaStatus.decoded(value)
        except KeyInvalid as error:
            self._is_invalid(error)
            return None

    # --- the watch --------------------------------------------------------------------------------------------------

    async def _keep_watch(self) -> None:
        """Read all keys of the cluster, and follow what becomes of them until the watch fails.

        Raises:
            EtcdRefused: etcd refuses the watch.
            AioRpcError: the stream has ended.
        """
        end = self._prefix[:-1] + bytes([self._prefix[-1] + 1])
        found = await self._calls.call(RANGE, pb.RangeRequest(key=self._prefix, range_end=end))
        if found is None:
            return
        self._alive.clear()
        is_key_there = False
        for kv in found.kvs:
            is_key_there |= kv.key == self._shard_key
            self._take(kv)
        if not is_key_there:
            self._observer.key_seen(ABSENT)
        self._observer.alive_seen(dict(self._alive))
        metadata = await self._calls.metadata()
        if metadata is None:
            return
        stream = self._calls.watch(metadata)
        try:
            wanted = pb.WatchCreateRequest(key=self._prefix, range_end=end, start_revision=found.header.revision + 1)
            async with asyncio.timeout(WATCH_SILENCE_S):  # before Python 3.12, `wait_for` may forget that it was cancelled
                await stream.write(pb.WatchRequest(create_request=wanted))
            await self._follow(stream)
        except TimeoutError:
            logger.debug("a watch was silent")
        finally:
            stream.cancel()

    async def _follow(self, stream: grpc.aio.StreamStreamCall[Any, Any]) -> None:
        """Tell the observer what a watch says. Raises TimeoutError when it says nothing, AioRpcError when it has ended."""
        loop = asyncio.get_running_loop()
        heard_s = loop.time()
        reading: asyncio.Future[Any] = asyncio.ensure_future(stream.read())
        try:
            while True:
                done, _ = await asyncio.wait((reading,), timeout=PROGRESS_S)
                if not done:
                    silence_s = loop.time() - heard_s
                    if silence_s >= WATCH_SILENCE_S:
                        raise TimeoutError
                    progress = pb.WatchRequest(progress_request=pb.WatchProgressRequest())
                    async with asyncio.timeout(WATCH_SILENCE_S):
                        await stream.write(progress)
                    continue
                answer = reading.result()
                if not isinstance(answer, pb.WatchResponse) or answer.canceled:  # the stream has ended
                    return
                heard_s = loop.time()
                self._take_events(answer.events)
                reading = asyncio.ensure_future(stream.read())
        finally:
            reading.cancel()
            await asyncio.wait((reading,))

    def _take_events(self, events: Any) -> None:
        has_changed = False
        for event in events:
            if event.kv.key == self._shard_key and event.type == pb.Event.DELETE:
                self._observer.key_seen(ABSENT)
            elif event.type == pb.Event.DELETE:
                replica = self._replica_of(event.kv.key)
                has_changed |= replica is not None and self._alive.pop(replica, None) is not None
            else:
                has_changed |= self._take(event.kv)
        if has_changed:
            self._observer.alive_seen(dict(self._alive))

    def _take(self, kv: pb.KeyValue) -> bool:
        """Take a key and its value. Return whether it is a replica's status."""
        if kv.key == self._shard_key:
            key = self._key_of([kv])
            if key is not None:
                self._observer.key_seen(key)
            return False
        replica, status = self._replica_of(kv.key), None
        if replica is not None:
            status = self._status_of(kv.value)
        if replica is None or status is None:
            return False
        self._alive[replica] = status
        return True

    def _replica_of(self, key: bytes) -> ReplicaId | None:
        if not key.startswith(self._alive_prefix):
            return None
        try:
            return replica_named(key[len(self._alive_prefix) :].decode())
        except ValueError as error:
            self._is_invalid(KeyInvalid(f"the coordinator has a key {excerpt(key, 200)}, which no replica writes ({error})"))
            return None
