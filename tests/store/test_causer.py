"""Causers: their names in records, and the accounts that are charged for them."""

from __future__ import annotations

import pytest

from penstock.store.space.causer import EXEMPT, LOCAL, NAME_BYTES_MAX, NODE, AccountKind, Causer, source_of

ANN = Causer.of("ann", "192.0.2.1", "pump")


@pytest.mark.parametrize(
    ("host", "source"),
    [
        ("192.0.2.1", "192.0.2.1"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("::ffff:192.0.2.1", "192.0.2.1"),
        ("fe80::1%eth0", "fe80::/64"),
        ("127.0.0.1", EXEMPT),
        ("::1", EXEMPT),
        ("", EXEMPT),
    ],
)
def test_a_source_is_an_address_or_a_network(host: str, source: str) -> None:
    assert source_of(host) == source


def test_a_causer_is_charged_from_its_tenant_down_to_its_client() -> None:
    chain = ANN._replace(tenant="acme").chain()
    assert [(step.kind, step.name) for step in chain] == [
        (AccountKind.TENANT, "acme"),
        (AccountKind.USER, "ann"),
        (AccountKind.SOURCE, "192.0.2.1"),
        (AccountKind.CLIENT, "pump"),
    ]
    assert ANN._replace(tenant="acme").account == chain[-1].account != ANN.account


def test_the_tenant_of_a_topic_is_apart_from_the_user() -> None:
    acme, other = ANN.for_topic("acme"), ANN.for_topic("other")
    assert acme.chain() == other.chain() == ANN.chain()
    assert len({acme.account, other.account, ANN.account, acme.chain()[-1].account}) == 3
    assert (acme.member().kind, acme.member().name) == (AccountKind.MEMBER, "acme")


def test_the_node_has_no_names() -> None:
    assert (NODE.chain(), NODE.account, NODE.row(), Causer.from_row([]), Causer.from_row(None)) == ((), 0, [], NODE, NODE)


def test_a_client_of_a_user_is_the_same_from_everywhere() -> None:
    assert ANN.account == Causer.of("ann", "192.0.2.2", "pump").account
    assert ANN.account != Causer.of("bob", "192.0.2.1", "pump").account


def test_a_client_without_a_user_name_is_one_of_its_source() -> None:
    assert Causer.of("", "192.0.2.1", "pump").account != Causer.of("", "192.0.2.2", "pump").account


@pytest.mark.parametrize(
    "causer", [ANN, Causer.of("", "", "pump"), Causer.of("ann", "192.0.2.1"), ANN._replace(tenant="a"), ANN.for_topic("a")]
)
def test_a_record_names_a_causer(causer: Causer) -> None:
    assert Causer.from_row(causer.row()) == causer


def test_a_source_that_no_limit_of_connections_applies_to_has_a_name() -> None:
    assert Causer.of("", EXEMPT).source == LOCAL


@pytest.mark.parametrize("name", ["x" * 65_535, "\u00fc" * 200, "\U0001f6b0" * 40])
def test_long_names_are_bounded_and_stay_different(name: str) -> None:
    bounded = Causer.of(name, "", name)
    assert len(bounded.user.encode()) <= NAME_BYTES_MAX
    assert bounded.user.startswith(name[:10])
    assert bounded != Causer.of(f"{name}x", "", name)
    assert Causer.of(bounded.user, "", bounded.client) == bounded
    assert ANN.for_topic(name).topic == bounded.user
