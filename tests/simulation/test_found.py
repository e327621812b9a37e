"""Defects that the simulation has found, each as the shortest run that shows it."""

from __future__ import annotations

import errno
from collections.abc import Awaitable
from random import Random
from typing import Any

import pytest

from penstock.gateway.protocol.decode import decode
from penstock.gateway.protocol.fixed_header import FROM_SERVER
from penstock.gateway.protocol.packets import CONNACK, PINGRESP, PUBREL
from penstock.node.config import Config
from penstock.pop.core.settings import ConsumerGroupSettings
from penstock.pop.proto import pop_pb2 as pb
from penstock.store.errors import DiskFull, RecordUnreadable
from penstock.store.log.block import read_block
from penstock.store.log.segment import LOG_DIRECTORY, segment_name
from penstock.store.options import KIB, StoreOptions
from penstock.store.record import Kind
from tests.gateway.packet_cases import connect, field, packet, subscribe
from tests.simulation.backups import Backups
from tests.simulation.disk import Directory, Disk, Inode
from tests.simulation.oracle import Oracle
from tests.simulation.orderedmap import Databases
from tests.simulation.popclient import served
from tests.simulation.process import DATA_DIR, KILLED, Machine, Process, SimulatedTransport, mqtt_options
from tests.simulation.virtualtime import Time


class Bench:
    """A node on a machine without faults, whose syncs take as long as the test says."""

    def __init__(self) -> None:
        self.sync_s = 0.001
        random = Random(1)
        self.machine = Machine(Time(), Disk(random), Databases(), random, lambda: self.sync_s)
        store = StoreOptions(segment_bytes=32 * KIB, reserve_bytes=0)
        config = Config(data_dir=DATA_DIR, store=store, mqtt=mqtt_options(share_ack_timeout_ms=1_000))
        self.process = Process(self.machine, config)
        self.process.start()
        self.run(0.1)

    def cut_power(self) -> None:
        """Keep nothing that is not on disk, and start the node again."""
        self.machine.disk.reboot()
        self.kill()

    def segment(self) -> Inode:
        """Return the file of the first segment."""
        found = self.machine.disk.directory(DATA_DIR / LOG_DIRECTORY).names[segment_name(0)]
        assert isinstance(found, Inode)
        return found

    def tear(self, position: int) -> None:
        """Keep what was written to the log before a position, and start the node again."""
        segment = self.segment()
        segment.write_back(sorted(segment.dirty))
        del segment.disk[position:]
        self.cut_power()

    def kill(self) -> None:
        """Kill the node, and start it again."""
        self.process.status = KILLED
        self.machine.databases.crash(self.machine.random)
        self.process = Process(self.machine, self.process.config)
        self.process.start()
        self.run(0.1)

    def run(self, seconds: float) -> None:
        """Let time pass."""
        assert self.process.run_until(self.machine.time.now_s + seconds)

    def call(self, work: Awaitable[Any], seconds: float = 0.1) -> Any:
        """Return the answer to a call."""
        answers: list[Any] = []

        def answered(response: Any, error: Exception | None) -> None:
            assert error is None
            answers.append(response)

        self.process.call(work, answered)
        self.run(seconds)
        (answer,) = answers
        return answer

    def pop(self, group: str, topic_filter: str, count: int) -> list[bytes]:
        """Return the bodies of popped messages."""
        request = pb.PopRequest(group=group, filter=topic_filter, messages_max=count, invisible_ms=60_000)
        data = self.call(served(self.process.servicer.Pop(request)))
        return [message.body for message in pb.PopResponse.FromString(data).messages]

    def connect(self, client_id: bytes, flags: int = 0) -> SimulatedTransport:
        """Return a connection of a client whose session lasts, unless the flags of its CONNECT say otherwise."""
        self.run(0.01)
        transport = self.process.connect(1)
        transport.feed(connect(flags, client_id, keep_alive_s=0))
        self.run(0.1)
        return transport


def test_a_pubrel_waits_for_its_record_on_the_next_connection_too() -> None:
    bench = Bench()
    subscriber = bench.connect(b"s")
    subscriber.feed(subscribe(1, (b"a", 2)))
    publisher = bench.connect(b"p")
    publisher.feed(packet(0x34, b"\x00\x01a\x00\x07body"))
    bench.run(0.2)
    assert subscriber.received.endswith(b"\x00\x01body")
    bench.sync_s = 10.0
    subscriber.feed(packet(0x50, b"\x00\x01"))
    bench.run(0.2)
    subscriber.leave()
    again = bench.connect(b"s")
    released = packet(PUBREL << 4 | 2, b"\x00\x01")
    assert released not in again.received, "the node could forget the PUBREC, and send the message again as a new one"
    bench.run(25.0)
    assert released in again.received


def test_a_delivery_at_qos_2_waits_for_its_packet_id_on_the_next_connection_too() -> None:
    bench = Bench()
    subscriber = bench.connect(b"s")
    subscriber.feed(subscribe(1, (b"a", 2)))
    publisher = bench.connect(b"p")
    bench.run(0.2)
    bench.sync_s = 10.0
    publisher.feed(packet(0x34, b"\x00\x01a\x00\x07body"))
    bench.run(0.2)
    assert b"body" not in subscriber.received
    subscriber.leave()
    again = bench.connect(b"s")
    assert b"body" not in again.received, "the node could forget the packet id, and send the message under another one"
    bench.run(25.0)
    assert b"body" in again.received


def test_a_segment_that_found_no_room_does_not_come_back_after_the_log_went_on_without_it() -> None:
    bench = Bench()
    bench.connect(b"s")
    publisher = bench.connect(b"p")
    log, disk = bench.process.store.log, bench.machine.disk
    while log.written < 30 * KIB:
        publisher.feed(packet(0x30, field(b"a") + bytes(900)))
        bench.run(0.01)
    disk.capacity_pages = disk.used_pages() + 1  # the next segment can be created, and finds no room
    publisher.feed(packet(0x30, field(b"a") + bytes(2500)))
    bench.run(0.01)
    folder = disk.root.names["data"]
    assert isinstance(folder, Directory)
    commitlog = folder.names["commitlog"]
    assert isinstance(commitlog, Directory)
    assert len(commitlog.names) == 1, "the next segment had no room"
    commitlog.put_on_disk(1)  # the kernel has written that there is a next segment, and not yet that it was deleted
    before = log.written
    bench.connect(b"s", flags=2)  # the end of its session frees space, so it is stored, where the refused message had no room
    bench.run(1.0)
    assert before < log.written == bench.process.store.durable_position
    acknowledged = log.read(before, log.written - before)
    disk.capacity_pages = None
    bench.cut_power()
    assert bench.process.store.log.read(before, len(acknowledged)) == acknowledged


def test_a_backup_is_there_after_a_power_cut() -> None:
    bench = Bench()
    backups = Backups(bench.machine, Oracle(lambda: bench.machine.time.now_s), lambda text: None)
    backups.make(bench.process, lambda: None, None)
    bench.machine.disk.reboot()
    backups.check(bench.process.config)


def test_a_shared_message_at_qos_2_is_not_kept_for_a_session_that_does_not_know_it() -> None:
    bench = Bench()
    member = bench.connect(b"m")
    member.feed(subscribe(1, (b"$share/g/a", 2)))
    publisher = bench.connect(b"p")
    bench.run(0.2)
    bench.sync_s = 10.0
    publisher.feed(packet(0x34, field(b"a") + b"\x00\x07body"))
    bench.run(0.1)
    assert b"body" not in member.received, "its packet id is not durable"
    kept = [record for record in bench.process.store.log.scan(0) if record.kind == Kind.POP_INVISIBLE_CHANGED]
    bench.tear(kept[0].position + kept[0].size)
    member = bench.connect(b"m")
    bench.run(30.0)
    assert b"body" in member.received


def test_a_shared_message_at_qos_2_comes_once_though_a_full_disk_delayed_its_acknowledgement() -> None:
    bench = Bench()
    member = bench.connect(b"m")
    member.feed(subscribe(1, (b"$share/g/a", 2)))
    publisher = bench.connect(b"p")
    bench.run(0.2)
    publisher.feed(packet(0x32, field(b"a") + b"\x00\x06once") + packet(0x34, field(b"a") + b"\x00\x07body"))
    bench.run(0.2)
    assert member.received.endswith(b"\x00\x02body")
    store = bench.process.store
    store.space.refuse(OSError(errno.ENOSPC, "no room"))

    def relieved() -> None:  # so there is something to commit
        bench.process.pop.groups.create("other", "b", "earliest", ConsumerGroupSettings())

    store.space.on_relief.insert(0, relieved)
    full = store.log.end
    member.feed(packet(0x40, b"\x00\x01") + packet(0x50, b"\x00\x02"))
    bench.run(0.001)
    assert store.log.end == full
    bench.run(5.0)
    kinds = [record.kind for record in store.log.scan(full)]
    saved = min(kinds.index(Kind.SESSIONS_ACKED), kinds.index(Kind.SESSION_OFFSETS))
    assert kinds.index(Kind.POP_ACK) < saved, "a kill in between would hand the message out again, under a new packet id"


def test_a_client_forgets_the_packet_id_of_a_message_at_qos_2_that_can_not_be_read_again() -> None:
    bench = Bench()
    subscriber = bench.connect(b"s")
    subscriber.feed(subscribe(1, (b"a", 2)))
    publisher = bench.connect(b"p")
    publisher.feed(packet(0x34, field(b"a") + b"\x00\x07" + bytes(5000)))
    bench.run(1.0)
    assert bytes(5000) in subscriber.received
    subscriber.leave()
    bench.run(1.0)
    segment = bench.segment()
    segment.bad_sectors.add(4)
    segment.resident.clear()
    again = bench.connect(b"s")
    bench.run(1.0)
    released = packet(PUBREL << 4 | 2, b"\x00\x01")
    assert again.received.endswith(released), "the client would take the next message with this packet id for the same"
    again.feed(packet(0x70, b"\x00\x01"))
    bench.run(1.0)
    again.leave()
    assert released not in bench.connect(b"s").received


def test_a_block_that_begins_with_an_unreadable_record_is_an_error_and_not_empty() -> None:
    bench = Bench()
    publisher = bench.connect(b"p")
    publisher.feed(packet(0x30, field(b"a") + bytes(10 * KIB)))
    bench.run(1.0)
    segment = bench.segment()
    segment.bad_sectors.add(2)  # the first bytes of the record can be read
    segment.resident.clear()
    with pytest.raises(RecordUnreadable, match=segment_name(0)):
        read_block(bench.process.store.log, 0, KIB * KIB)


@pytest.mark.parametrize(("old", "new"), [(0, 0), (2, 0), (0, 2)], ids=["resumed", "begun", "ended"])
def test_a_connack_waits_for_the_record_of_what_became_of_the_session(old: int, new: int) -> None:
    bench = Bench()
    device = bench.connect(b"d", flags=old)
    device.feed(packet(0x34, field(b"a") + b"\x00\x05first"))
    bench.run(1.0)
    device.leave()
    bench.run(1.0)
    bench.sync_s = 10.0
    device = bench.connect(b"d", flags=new)
    device.feed(packet(0xC0, b""))
    bench.run(1.0)
    assert not device.received, "after a power cut an ended session could swallow a message as one that it has received"
    bench.run(25.0)
    assert [packet[0] for packet in decode(bytes(device.received), KIB, FROM_SERVER)[0]] == [CONNACK, PINGRESP]


def test_a_connack_waits_for_nothing_if_no_session_is_stored() -> None:
    bench = Bench()
    bench.sync_s = 10.0
    assert bench.connect(b"d", flags=2).received


def test_a_client_gets_nothing_before_the_log_says_that_it_is_connected() -> None:
    bench = Bench()
    subscriber = bench.connect(b"s")
    subscriber.feed(subscribe(1, (b"a", 1)))
    bench.run(1.0)
    subscriber.leave()
    publisher = bench.connect(b"p")
    publisher.feed(packet(0x32, field(b"a") + b"\x00\x07body"))
    bench.run(1.0)
    bench.sync_s = 10.0
    subscriber = bench.connect(b"s")
    assert b"body" not in subscriber.received, "the next node would not know that the message comes again, and not set DUP"
    bench.run(25.0)
    assert b"body" in subscriber.received


def test_a_backfill_that_ends_on_a_full_disk_adds_its_entries_once(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    publisher = bench.connect(b"p")
    for _ in range(5):
        publisher.feed(packet(0x30, field(b"a") + b"body"))
    bench.run(0.1)
    store = bench.process.store
    append = store.queues._append

    def refuse(kind: Kind, *arguments: bytes) -> int:
        if kind == Kind.QUEUE_BACKFILLED:
            raise DiskFull("no room")
        return append(kind, *arguments)

    monkeypatch.setattr(store.queues, "_append", refuse)
    bench.process.pop.groups.create("g", "a", "earliest", ConsumerGroupSettings())
    bench.run(1.0)
    store.commit()
    store.index.flush()
    bench.kill()
    bench.run(1.0)
    queue = bench.process.store.queues.find("a", "earliest")
    assert queue is not None
    assert queue.next_offset == 5


def test_a_group_misses_nothing_if_a_queue_is_filled_again_after_damage() -> None:
    bench = Bench()
    publisher = bench.connect(b"p")
    for number in range(20):
        publisher.feed(packet(0x30, field(b"a") + b"%02d" % number + bytes(500)))
    bench.run(0.1)
    bench.process.pop.groups.create("g", "a", "earliest", ConsumerGroupSettings())
    bench.run(0.1)
    assert len(bench.pop("g", "a", 12)) == 12
    bench.process.status = KILLED  # before RocksDB has flushed anything
    bench.machine.databases.crash(bench.machine.random)
    bench.process = Process(bench.machine, bench.process.config)
    segment = bench.segment()
    segment.bad_sectors.add(2)
    segment.resident.clear()
    bench.process.start()
    bench.run(0.1)
    came = [body[:2] for body in bench.pop("g", "a", 30)]
    assert came == [b"%02d" % number for number in range(8, 20)], "the first 4 KiB can't be read"


def delayed(bench: Bench, delay_ms: int) -> pb.SendResult:
    """Return what the node answers to a delayed message."""
    request = pb.SendRequest(messages=[pb.Message(topic="a", body=b"body", delay_ms=delay_ms)])
    (result,) = pb.SendResponse.FromString(bench.call(served(bench.process.servicer.Send(request)))).results
    return result


def test_a_call_that_reschedules_a_message_says_what_it_did_though_the_message_has_fired_since() -> None:
    bench = Bench()
    sent = delayed(bench, 60_000)
    bench.sync_s = 2.0
    name = pb.TimerName(recall_handle=sent.recall_handle)
    request = pb.RescheduleTimerRequest(name=name, delay_ms=100)
    timer = bench.call(served(bench.process.timers.RescheduleTimer(request)), 5.0)
    assert timer.status.code == pb.OK, "the caller would take it for a message that had fired at its old time"


def test_a_client_hears_that_a_message_was_replaced_when_that_is_durable() -> None:
    bench = Bench()
    sent = delayed(bench, 60_000)
    bench.sync_s = 2.0
    name = pb.TimerName(recall_handle=sent.recall_handle)
    answers: list[int] = []
    for delay_ms in (10_000, 20_000):
        request = pb.RescheduleTimerRequest(name=name, delay_ms=delay_ms)
        work = served(bench.process.timers.RescheduleTimer(request))
        bench.process.call(work, lambda timer, error: answers.append(timer.status.code))
    bench.run(1.0)
    assert answers == [], "a power cut could leave the message pending, although a client was told that it is not"
    bench.run(5.0)
    assert answers == [pb.OK, pb.ALREADY_RECALLED]
