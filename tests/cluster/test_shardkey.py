"""The key of a shard, as the coordinator keeps it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.cluster.errors import KeyInvalid
from penstock.cluster.shardkey import IDS, ShardKey, name_of, replica_named

ids = st.integers(0, IDS - 1)
small = st.integers(1, 9)
keys = st.builds(
    ShardKey,
    revision=st.just(7),
    epoch=st.integers(0, 2**62),
    leader=st.none() | ids,
    members=st.frozensets(ids, max_size=5),
    required=small,
    level=small,
)


@given(keys)
def test_a_key_is_read_as_it_was_written(key: ShardKey) -> None:
    assert ShardKey.decoded(key.encoded(), 7) == key


@given(ids)
def test_an_id_is_16_hexadecimal_digits(replica: int) -> None:
    assert len(name_of(replica)) == 16
    assert replica_named(name_of(replica)) == replica


@pytest.mark.parametrize(
    "value",
    [b"", b"{}", b"[]", b"\xff", b'{"epoch": 1, "leader": "7", "members": [], "required": 1, "level": 1}', b'{"epoch": "x"}'],
)
def test_a_foreign_value_is_refused_with_what_to_check(value: bytes) -> None:
    with pytest.raises(KeyInvalid, match=r"check replication\.cluster"):
        ShardKey.decoded(value, 1)
