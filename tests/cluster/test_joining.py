"""Which options make a replica, and which data directories may be one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.cluster.errors import FilesInvalid, ReplicaInvalid
from penstock.cluster.options import ReplicationOptions
from penstock.cluster.replicafile import make_replica, read_replica
from penstock.node.config import Config, load_config
from penstock.node.errors import ConfigError, ListenerExposed
from penstock.node.node import Node
from penstock.node.replication import check_replication
from penstock.store.options import HostPort, StoreOptions
from tests.gateway.certificates import Authority
from tests.store.wiring import close, open_store, publish

ETCD = ("127.0.0.1:2379",)


def written(tmp_path: Path, **options: Any) -> Path:
    """Write a configuration with a section [replication]."""
    path = tmp_path / "node.toml"
    lines = [f"{name} = {value!r}".replace("'", '"') for name, value in options.items()]
    path.write_text("[replication]\n" + "\n".join(lines))
    return path


def test_a_node_is_no_replica_by_default() -> None:
    assert not Config().replication.is_on
    check_replication(Config())


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"cluster": "a b", "coordinator": ["h:1"]}, r"replication\.cluster"),
        ({"cluster": "prod"}, r"replication\.coordinator"),
        ({"cluster": "prod", "coordinator": ["h"]}, "HOST:PORT"),
        ({"cluster": "prod", "coordinator": ["h:0"]}, "a port that is not 0"),
        ({"cluster": "prod", "coordinator": ["h:1"], "advertise": "h"}, "HOST:PORT"),
        ({"cluster": "prod", "coordinator": ["h:1"], "certificate_file": "c.pem"}, r"replication\.key_file"),
        ({"cluster": "prod", "coordinator": ["h:1"], "etcd_certificate_file": "c.pem"}, r"replication\.etcd_key_file"),
        ({"cluster": "prod", "coordinator": ["h:1"], "etcd_user": "p"}, r"replication\.etcd_password_file"),
    ],
)
def test_options_that_do_not_fit_are_refused_by_name(tmp_path: Path, options: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        load_config(written(tmp_path, **options))


def test_strangers_must_not_be_replicas() -> None:
    options = ReplicationOptions(cluster="prod", coordinator=ETCD, listen=HostPort("0.0.0.0", 7650))
    with pytest.raises(ListenerExposed, match=r"0\.0\.0\.0:7650, which is beyond loopback\. Set replication\.certificate_file"):
        check_replication(Config(replication=options))


def test_replicas_acknowledge_what_is_on_disk() -> None:
    options = ReplicationOptions(cluster="prod", coordinator=ETCD)
    with pytest.raises(ConfigError, match=r"store\.flush is 'async'"):
        check_replication(Config(replication=options, store=StoreOptions(flush="async")))


def test_files_that_can_t_be_used_are_named(tmp_path: Path) -> None:
    absent = str(tmp_path / "absent")
    options = ReplicationOptions(cluster="prod", coordinator=ETCD, etcd_user="p", etcd_password_file=absent)
    with pytest.raises(FilesInvalid, match=r"absent can't be read .* check replication\.etcd_password_file"):
        options.etcd()
    authority = Authority(tmp_path / "ca")
    certificate, key = authority.issue_client("replica")
    good = {"certificate_file": str(certificate), "key_file": str(key), "ca_file": str(authority.file)}
    assert ReplicationOptions(cluster="prod", coordinator=ETCD, **good).tls() is not None  # type: ignore[arg-type]
    for name in good:
        with pytest.raises(FilesInvalid, match=r"check replication\.certificate_file"):
            ReplicationOptions(cluster="prod", coordinator=ETCD, **{**good, name: absent}).tls()  # type: ignore[arg-type]


def test_a_password_file_may_end_with_a_line_feed(tmp_path: Path) -> None:
    path = tmp_path / "password"
    path.write_text("secret\n")
    options = ReplicationOptions(cluster="prod", coordinator=ETCD, etcd_user="p", etcd_password_file=str(path))
    assert (options.etcd().user, options.etcd().password) == ("p", "secret")


# --- data directories -----------------------------------------------------------------------------------------------


def test_a_directory_keeps_its_id(tmp_path: Path) -> None:
    assert read_replica(tmp_path, "prod") is None
    replica = make_replica(tmp_path, "prod")
    assert read_replica(tmp_path, "prod") == replica
    assert make_replica(tmp_path / "..", "prod") != replica


def test_a_directory_of_another_cluster_is_refused(tmp_path: Path) -> None:
    make_replica(tmp_path, "test")
    with pytest.raises(ReplicaInvalid, match=r"is a replica of cluster 'test', but replication\.cluster is 'prod'"):
        read_replica(tmp_path, "prod")


@pytest.mark.parametrize("content", [b"", b"{}", b'{"cluster": "prod", "replica": "x"}'])
def test_a_damaged_file_is_refused_with_what_to_do(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "replica").write_bytes(content)
    with pytest.raises(ReplicaInvalid, match="begin anew with an empty directory"):
        read_replica(tmp_path, "prod")


def test_a_directory_with_data_does_not_join_a_cluster(tmp_path: Path) -> None:
    store = open_store(tmp_path / "data")
    publish(store, "plant/1", "precious")
    close(store)
    config = Config(data_dir=tmp_path / "data", replication=ReplicationOptions(cluster="prod", coordinator=ETCD))
    for _ in range(2):  # and leaves nothing open
        with pytest.raises(ReplicaInvalid, match="has data, and is no replica of cluster 'prod'; make the cluster from it"):
            Node(config)
    store = open_store(tmp_path / "data")
    assert store.log.end > 0
    close(store)
