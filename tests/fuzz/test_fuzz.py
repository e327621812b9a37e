"""A few seconds of each search of `make fuzz`, and checks that the searches find defects."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import time
from pathlib import Path

import pytest

from penstock.gateway.protocol.encode import encode_connack, encode_publish
from penstock.gateway.protocol.reasons import ConnectCode
from penstock.install import install_hint
from tests.depth import DEPTH
from tests.fuzz.calls import APIS, METHODS_MAX, CallSequence, CallStep
from tests.fuzz.codec import check_answers, check_codec
from tests.fuzz.inputs import CUTS, Attack, variants_of
from tests.fuzz.search import search, search_calls, search_codec, search_listener, search_sequences
from tests.fuzz.sequences import REFUSED, VIOLATIONS, Player, Sequence, Step, sequences
from tests.fuzz.target import ROOT, Hang, Target, deadline
from tests.fuzz.wires import TRANSPORTS
from tests.waiting import PROCESS_S

pytestmark = pytest.mark.nightly

EXAMPLES = 100 * DEPTH
CONNECTED = Step("connect", ("seq-1", True, 100, 0))
SECONDS_MAX = 15.0 * DEPTH
"""A slow machine checks fewer examples in this time."""


def test_the_codec_decodes_any_bytes_or_says_what_is_wrong_with_them() -> None:
    assert search_codec(SECONDS_MAX, EXAMPLES) > EXAMPLES


def test_a_node_survives_any_bytes_on_any_listener_leaks_nothing_and_serves_others() -> None:
    with Target() as target:
        assert search_listener(target, SECONDS_MAX, EXAMPLES) > EXAMPLES
        state = target.close()
    assert {"MALFORMED_PACKET", "PROTOCOL_ERROR"} <= set(state["closed"])


@pytest.mark.parametrize("is_secured", [False, True])
def test_sequences_of_clients_and_calls_get_the_answers_that_the_protocols_name(is_secured: bool) -> None:
    with Target(is_secured=is_secured) as target:
        for transport in TRANSPORTS:
            assert search_sequences(target, SECONDS_MAX / 4, EXAMPLES // 4, transport=transport)
        for api in APIS:
            assert search_calls(target, SECONDS_MAX / 4, EXAMPLES // 4, api=api)
        target.close()
    assert target.player.counts["violate"]
    assert target.player.counts["deliveries"]


def test_each_violation_of_a_connected_client_gets_its_reason() -> None:
    with Target() as target:
        for name in VIOLATIONS:
            target.play(Sequence("mqtt", True, [CONNECTED, Step("violate", (name,))]))
        for name in REFUSED:
            target.play(Sequence("mqtt", True, [Step("begin_wrong", (name,))]))
        assert target.player.counts["violate"] == len(VIOLATIONS)


def test_a_seed_repeats_its_sequences() -> None:
    def first(seed: int) -> list[Sequence]:
        found: list[Sequence] = []
        search(sequences(), found.append, 60, 20, seed)
        return found

    assert first(7) == first(7) != first(8)


def test_a_request_that_is_no_message_is_refused_and_leaves_no_trace_in_the_log() -> None:
    with Target() as target:
        for api in APIS:
            for method in range(METHODS_MAX):
                for seed in range(3):
                    target.call(CallSequence(api, [CallStep(method, seed, 20, 0)]))
        assert target.calls.counts["INVALID_ARGUMENT"]


def test_the_coverage_guided_search_runs(tmp_path: Path) -> None:
    if importlib.util.find_spec("atheris") is None:
        pytest.skip(f"atheris is not installed: {install_hint('fuzz')}; there are wheels for Linux on x86-64")
    # libFuzzer judges by the peak of resident memory, which a process inherits from the one that starts it. A shell is small.
    command = ["sh", "-c", '"$@"; exit $?', "sh", sys.executable, "-m", "tests.fuzz.guided", "2", str(tmp_path)]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PROCESS_S)
    assert found.returncode == 0, found.stderr[-2000:]
    assert "stat::number_of_executed_units" in found.stderr
    assert list(tmp_path.glob("failed-*")) == []


# --- which defects the searches detect -------------------------------------------------------------------------------


@pytest.mark.parametrize("data", [b"\0\0", encode_publish(b"a", b"x")[:-1] + b"x\xc0\0", b"\x20\5\0\0\2\x21\0", b"\xe0\1\x10"])
def test_the_search_detects_bytes_that_are_not_packets_of_a_server(data: bytes) -> None:
    with pytest.raises(AssertionError, match="bytes that are not MQTT"):
        check_answers(data)


@pytest.mark.parametrize("data", [b"", encode_connack(False, ConnectCode.ACCEPTED) + encode_publish(b"a", b"x"), b"\xd0"])
def test_the_search_accepts_packets_of_a_server_and_a_last_one_that_was_cut(data: bytes) -> None:
    check_answers(data)


@pytest.mark.parametrize(
    "data",
    [
        b"\x40\x82\x00\x5d\x01\x40\x02\xfa\x01",  # the remaining length of the first PUBACK takes two bytes
        b"\x30\xff\xff\x7f\0\4a/bcxyz",  # too large, with its topic
    ],
)
def test_what_searches_have_found_is_right(data: bytes) -> None:
    check_codec(data)


def test_the_search_detects_a_parser_that_raises_any_other_exception(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.gateway.protocol.connect.protocol_level", lambda body: body[1000])
    with pytest.raises(IndexError):
        check_codec(b"\x10\2\0\0")


def test_the_search_detects_an_input_that_takes_too_long() -> None:
    with pytest.raises(Hang), deadline(0.01):
        time.sleep(60)


def test_a_deadline_inside_another_keeps_the_outer_one() -> None:
    def wait() -> None:
        with deadline(30):
            pass
        time.sleep(60)

    with pytest.raises(Hang, match="longer than 1 s"), deadline(1):
        wait()


def test_the_search_detects_a_leaked_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.fuzz.target.SETTLED_S_MAX", 0.0)
    with Target() as target:
        kept = target.dial("mqtt")
        with pytest.raises(AssertionError, match="more than the clients"):
            target.close()
        kept.close()


@pytest.mark.parametrize("step", [Step("release", ("right",)), Step("ping"), Step("subscribe", (("seq/#",), 1, 0))])
def test_a_sequence_detects_a_node_that_closes_for_no_reason(monkeypatch: pytest.MonkeyPatch, step: Step) -> None:
    hello = Player._hello
    monkeypatch.setattr(Player, "_hello", lambda *about: hello(*about) + b"\xe0\0")
    with Target() as target, pytest.raises(AssertionError, match="closed the connection"):
        target.play(Sequence("mqtt", True, [CONNECTED, step]))


def test_a_sequence_detects_another_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "publish, QoS 3"
    monkeypatch.setitem(VIOLATIONS, name, VIOLATIONS[name]._replace(data=VIOLATIONS["subscribe, nothing"].data))
    with Target() as target, pytest.raises(AssertionError, match="in place of"):
        target.play(Sequence("mqtt", True, [CONNECTED, Step("violate", (name,))]))


def test_the_search_detects_an_exception_in_the_log() -> None:
    with Target() as target:
        target._log.write_text("Traceback (most recent call last)")
        with pytest.raises(AssertionError, match="the node logged"):
            target.check()


def test_the_search_detects_growing_memory() -> None:
    with Target() as target:
        target.samples = [(0.0, 0)]
        with pytest.raises(AssertionError, match="memory grew"):
            target.close()


def test_the_search_detects_a_node_that_dies() -> None:
    with Target() as target:
        target.kill()
        with pytest.raises((AssertionError, ConnectionError, BrokenPipeError)):
            target.attack(Attack("mqtt", [[b"x"]], False, 0))


def test_an_attack_always_has_the_same_variants() -> None:
    attack = Attack("mqtt", [[b"some", b"thing"], [b"else"]], False, 7)
    first, *more = found = list(variants_of(attack))
    assert first == attack
    assert found == list(variants_of(attack))
    assert len({str(one) for one in more}) > 1
    assert max(len(stream) for one in more for stream in one.streams) - 1 <= CUTS
