"""The coordinator on real etcd: its keys, its leases, and everything that can fail."""

from __future__ import annotations

import asyncio
import base64
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from penstock.cluster import etcd as etcd_module
from penstock.cluster.coordinator import Answer, ReplicaStatus
from penstock.cluster.errors import KeyInvalid
from penstock.cluster.etcd import EtcdCoordinator
from penstock.cluster.options import EtcdOptions
from penstock.cluster.shardkey import ABSENT, ShardKey
from tests.cluster.etcdserver import EtcdServers, etcd_servers
from tests.cluster.observed import Observed
from tests.gateway.certificates import Authority
from tests.waiting import until

pytestmark = pytest.mark.nightly

FIRST = ShardKey(0, 1, 0xA, frozenset({0xA, 0xB}), 2)


def status(position: int = 0, instance: str = "one") -> ReplicaStatus:
    return ReplicaStatus({"replication": "127.0.0.1:7000"}, "0.1.0", 1, position, instance)


@pytest.fixture
def etcd() -> Iterator[EtcdServers]:
    with etcd_servers() as servers:
        yield servers


@asynccontextmanager
async def coordinator(servers: EtcdServers, replica: int = 0xA, **options: object) -> AsyncIterator[EtcdCoordinator]:
    made = EtcdCoordinator(EtcdOptions(servers.endpoints, **options), "prod", replica)  # type: ignore[arg-type]
    try:
        yield made
    finally:
        await made.close()


async def eventually(made: EtcdCoordinator) -> ShardKey:
    """Return the key when etcd answers."""
    async with asyncio.timeout(60):
        while (key := await made.read()) is None:  # noqa: ASYNC110 - etcd tells nobody that it is ready
            await asyncio.sleep(0.02)
        return key


async def test_of_two_swaps_of_one_revision_one_succeeds_and_the_other_learns_the_key(etcd: EtcdServers) -> None:
    async with coordinator(etcd) as one, coordinator(etcd, 0xB) as other:
        assert await eventually(one) == ABSENT
        answers = await asyncio.gather(one.swap(FIRST), other.swap(FIRST._replace(leader=0xB)))
        swapped = [each for each in answers if each is not None and each.is_swapped]
        assert len(swapped) == 1
        key = swapped[0].key
        assert [each for each in answers if each not in swapped] == [Answer(False, key)]
        assert (key.revision > 0, await one.read()) == (True, key)
        answer = await one.swap(key._replace(epoch=2))
        assert answer is not None
        assert answer == (True, key._replace(epoch=2, revision=answer.key.revision))
        assert answer.key.revision > key.revision
        assert await other.swap(key._replace(epoch=3)) == (False, answer.key), "the revision is old"


async def test_a_swap_that_is_repeated_is_told_what_the_first_one_has_done(etcd: EtcdServers) -> None:
    async with coordinator(etcd) as one:
        await eventually(one)
        first = await one.swap(FIRST)
        assert first is not None
        assert await one.swap(FIRST) == (False, first.key)


async def test_an_observer_sees_the_key_and_who_is_alive(etcd: EtcdServers) -> None:
    seen = Observed()
    async with coordinator(etcd) as one:
        one.start(seen, status(1))
        await until(lambda: seen.alive == {0xA: status(1)})
        assert seen.keys == [ABSENT]
        async with coordinator(etcd, 0xB) as other:
            other.start(Observed(), status(2))
            await until(lambda: seen.alive == {0xA: status(1), 0xB: status(2)})
            await other.swap(FIRST)
            await until(lambda: seen.keys[-1].epoch == 1)
            one.announce(status(7))
            await until(lambda: seen.alive[0xA].position == 7)
        await until(lambda: seen.alive == {0xA: status(7)})
        etcd.call("kv/deleterange", {"key": base64.b64encode(b"/penstock/prod/shard/0").decode()})
        await until(lambda: seen.keys[-1] == ABSENT)


async def test_a_replica_that_dies_is_forgotten_when_its_lease_ends(etcd: EtcdServers) -> None:
    seen = Observed()
    async with coordinator(etcd) as one:
        one.start(seen, status())
        async with coordinator(etcd, 0xB) as other:
            other.start(Observed(), status())
            await until(lambda: set(seen.alive) == {0xA, 0xB})
            other._lease = 0  # so its close revokes nothing
        assert set(seen.alive) == {0xA, 0xB}
        await until(lambda: set(seen.alive) == {0xA})


async def test_an_end_of_etcd_is_no_answer_and_no_death(etcd: EtcdServers) -> None:
    seen = Observed()
    (member,) = etcd.members
    async with coordinator(etcd) as one, coordinator(etcd, 0xB) as other:
        one.start(seen, status())
        other.start(Observed(), status())
        await until(lambda: set(seen.alive) == {0xA, 0xB})
        member.kill()
        assert await one.read() is None
        assert await one.swap(FIRST) is None
        assert member.endpoint in one.problem
        await asyncio.sleep(etcd_module.WATCH_SILENCE_S)
        assert set(seen.alive) == {0xA, 0xB}, "nobody knows that somebody died"
        member.start([])
        assert await eventually(one) == ABSENT
        one.announce(status(9))
        await until(lambda: seen.alive.get(0xA) == status(9) and 0xB in seen.alive)
        assert one.problem == ""


async def test_it_closes_while_it_writes_to_a_watch(etcd: EtcdServers, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cancelled just when a write ended, the task that keeps the watch used to go on, and `close` never returned."""
    monkeypatch.setattr(etcd_module, "PROGRESS_S", 0.0003)
    for number in range(100):
        one = EtcdCoordinator(EtcdOptions(etcd.endpoints), "prod", 0xA)
        one.start(Observed(), status())
        await asyncio.sleep(0.02 + number % 10 / 1000)
        async with asyncio.timeout(60):
            await one.close()


async def test_three_members_serve_while_one_is_killed_or_paused() -> None:
    seen = Observed()
    with etcd_servers(3) as servers:
        async with coordinator(servers) as one, coordinator(servers, 0xB) as other:
            await eventually(one)
            answer = await one.swap(FIRST)
            assert answer is not None
            key = answer.key
            one.start(seen, status())
            other.start(Observed(), status())
            await until(lambda: set(seen.alive) == {0xA, 0xB})
            for member in servers.members:
                member.signal(signal.SIGSTOP)
                key = await bumped(one, key)
                await seen.until_key(key)
                member.signal(signal.SIGCONT)
                member.kill()
                key = await bumped(one, key)
                await seen.until_key(key)
                one.announce(status(key.epoch))
                await seen.until_position(0xA, key.epoch)
                member.start([])
            for member in servers.members:
                member.kill()
            assert await one.swap(key) is None
            for member in servers.members:
                member.start([])
            assert await eventually(one) == key
            one.announce(status(99))
            await until(lambda: seen.alive.get(0xA) == status(99))
    revisions = [each.revision for each in seen.keys]
    assert revisions == sorted(revisions), "values of the key come in order"


async def bumped(made: EtcdCoordinator, key: ShardKey) -> ShardKey:
    """Replace the key by the next epoch, however often there is no answer, and return it."""
    wanted = key._replace(epoch=key.epoch + 1)
    async with asyncio.timeout(60):
        while (answer := await made.swap(wanted)) is None:  # noqa: ASYNC110 - a swap without an answer is repeated
            await asyncio.sleep(0.02)
    assert answer.key._replace(revision=0) == wanted._replace(revision=0)
    return answer.key


async def test_a_directory_that_was_copied_is_told_of_its_twin(etcd: EtcdServers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(etcd_module, "TWIN_LEASES", 1)
    first, second = Observed(), Observed()
    async with coordinator(etcd) as one, coordinator(etcd) as other:
        one.start(first, status(instance="one"))
        await until(lambda: first.alive)
        other.start(second, status(instance="two"))
        await until(lambda: second.twins)
        assert second.twins[0].instance == "one"
        assert (first.twins, first.alive[0xA].instance) == ([], "one")


async def test_a_process_that_starts_again_takes_the_place_of_the_one_that_was_killed(etcd: EtcdServers) -> None:
    async with coordinator(etcd) as one:
        one.start(Observed(), status(instance="one"))
        seen = Observed()
        async with coordinator(etcd) as again:
            again.start(seen, status(instance="two"))
            await until(lambda: seen.alive)
            for task in one._tasks:
                task.cancel()  # so nobody keeps its lease alive
            await until(lambda: 0xA in seen.alive and seen.alive[0xA].instance == "two")
            assert seen.twins == []


@pytest.mark.parametrize("value", [b"7", b'{"epoch": 1}'])
async def test_a_value_that_no_replica_writes_is_no_answer(etcd: EtcdServers, value: bytes) -> None:
    async with coordinator(etcd) as one:
        await eventually(one)
        body = {"key": base64.b64encode(b"/penstock/prod/shard/0").decode(), "value": base64.b64encode(value).decode()}
        etcd.call("kv/put", body)
        assert await one.read() is None
        assert "which no replica writes" in one.problem
        assert await one.swap(FIRST) is None
        etcd.call("kv/put", {**body, "value": base64.b64encode(FIRST.encoded()).decode()})
        assert (await eventually(one)).epoch == 1
        assert one.problem == ""


async def test_statuses_that_no_replica_writes_are_passed_over(etcd: EtcdServers) -> None:
    seen = Observed()
    async with coordinator(etcd) as one:
        await eventually(one)
        for key, value in ((b"alive/zz", b"{}"), (b"alive/000000000000000b", b"[]"), (b"other", b"")):
            etcd.call(
                "kv/put",
                {"key": base64.b64encode(b"/penstock/prod/" + key).decode(), "value": base64.b64encode(value).decode()},
            )
        one.start(seen, status())
        await until(lambda: set(seen.alive) == {0xA})


def test_a_status_is_read_as_it_was_written() -> None:
    assert ReplicaStatus.decoded(status(5).encoded()) == status(5)
    with pytest.raises(KeyInvalid, match=r"check replication\.cluster"):
        ReplicaStatus.decoded(b"{}")


# --- users and certificates ------------------------------------------------------------------------------------------


def with_users(servers: EtcdServers) -> None:
    """Give etcd a user `penstock` who may use the keys below /penstock/, and one who may not."""
    first, end = (base64.b64encode(each).decode() for each in (b"/penstock/", b"/penstock0"))
    servers.call("auth/role/add", {"name": "root"})
    servers.call("auth/role/add", {"name": "penstock"})
    servers.call("auth/role/grant", {"name": "penstock", "perm": {"permType": "READWRITE", "key": first, "range_end": end}})
    for name in ("root", "penstock", "stranger"):
        servers.call("auth/user/add", {"name": name, "password": f"{name}-secret"})
    servers.call("auth/user/grant", {"user": "root", "role": "root"})
    servers.call("auth/user/grant", {"user": "penstock", "role": "penstock"})
    servers.call("auth/enable", {})


async def test_a_user_of_etcd_authenticates_itself_anew_when_its_token_is_old(etcd: EtcdServers) -> None:
    with_users(etcd)
    seen = Observed()
    async with coordinator(etcd, user="penstock", password="penstock-secret") as one:
        assert await eventually(one) == ABSENT
        one.start(seen, status())
        await until(lambda: 0xA in seen.alive)
        etcd.members[0].kill()  # which forgets tokens
        etcd.members[0].start([])
        assert await eventually(one) == ABSENT
        one.announce(status(3))
        await until(lambda: seen.alive.get(0xA) == status(3))


@pytest.mark.parametrize(
    ("user", "password", "problem"),
    [
        ("penstock", "wrong", "check the password of user 'penstock'"),
        ("nobody", "wrong", "check the password of user 'nobody'"),
        ("stranger", "stranger-secret", "give user 'stranger' a role"),
        ("", "", "set replication.etcd_user"),
    ],
)
async def test_what_etcd_refuses_is_no_answer_with_a_remedy(etcd: EtcdServers, user: str, password: str, problem: str) -> None:
    with_users(etcd)
    async with coordinator(etcd, user=user, password=password) as one:
        one.start(Observed(), status())
        assert await one.read() is None
        assert problem in one.problem
        assert await one.swap(FIRST) is None
        assert problem in one.problem


async def test_a_user_of_an_etcd_without_users_is_told_so(etcd: EtcdServers) -> None:
    async with coordinator(etcd) as one:
        await eventually(one)
    async with coordinator(etcd, user="penstock", password="x") as one:
        assert await one.read() is None
        assert "leave out replication.etcd_user" in one.problem


async def test_etcd_and_the_replica_check_each_other_s_certificates(tmp_path: Path) -> None:
    authority, foreign = Authority(tmp_path / "a"), Authority(tmp_path / "b")
    files = {"cert-file": authority.certificate, "key-file": authority.key, "trusted-ca-file": authority.file}
    certificate, key = authority.issue_client("replica-a.example")
    roots = authority.file.read_bytes()
    with etcd_servers(files=files) as servers:
        tls: dict[str, Any] = {"certificate": certificate.read_bytes(), "key": key.read_bytes()}
        async with coordinator(servers, root_certificates=roots, **tls) as one:
            assert await eventually(one) == ABSENT
        async with coordinator(servers, root_certificates=foreign.file.read_bytes(), **tls) as one:
            assert await one.read() is None
            assert "certificate" in one.problem.lower() or "handshake" in one.problem.lower()
        async with coordinator(servers, root_certificates=roots) as one:
            assert await one.read() is None
            assert servers.endpoints[0] in one.problem
