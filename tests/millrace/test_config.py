from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.config import SECTIONS, Config, ConfigError, HostPort, document_options, load_config
from store.options import OptionInvalid, StoreOptions, bounds_of, check_options


def load(tmp_path: Path, text: str, **overrides: Any) -> Config:
    path = tmp_path / "millrace.toml"
    path.write_text(text, encoding="utf-8")
    return load_config(path, overrides)


# --- addresses ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("127.0.0.1:1883", HostPort("127.0.0.1", 1883)),
        ("localhost:0", HostPort("localhost", 0)),
        ("broker.example.org:65535", HostPort("broker.example.org", 65535)),
        ("[::1]:0", HostPort("::1", 0)),
        ("[fe80::1%eth0]:8081", HostPort("fe80::1%eth0", 8081)),
    ],
)
def test_an_address_is_read_and_written_in_the_same_way(text: str, address: HostPort) -> None:
    assert HostPort.parse(text) == address
    assert str(address) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        ":",
        "1883",
        ":1883",
        "localhost",
        "localhost:",
        "localhost:mqtt",
        "localhost:-1",
        "localhost:65536",
        "localhost:000001",
        "localhost:\N{FULLWIDTH DIGIT ONE}",
        "::1:1883",
        "[::1]",
        "[::1]1883",
        "[]:1883",
        "[localhost]:1883",
        "[[::1]]:1883",
        "mqtt://localhost:1883",
        "local host:1883",
        "local\nhost:1883",
    ],
)
def test_what_is_no_address_is_refused_by_its_text(text: str) -> None:
    with pytest.raises(OptionInvalid, match="HOST:PORT") as caught:
        HostPort.parse(text)
    assert caught.value.value == text


@given(st.text())
def test_any_text_is_an_address_or_refused(text: str) -> None:
    try:
        address = HostPort.parse(text)
    except OptionInvalid:
        return
    assert HostPort.parse(str(address)) == address


# --- loading --------------------------------------------------------------------------------------------------------


def test_without_a_file_every_option_has_its_default() -> None:
    assert load_config() == Config()


def test_a_file_changes_what_it_names_and_nothing_else(tmp_path: Path) -> None:
    config = load(
        tmp_path,
        """
        data_dir = "/var/lib/millrace"
        [store]
        flush = "async"
        [mqtt]
        listen = "[::]:1884"
        [pop]
        retry_backoff_ms = [1_000, 5_000]
        """,
    )
    defaults = Config()
    assert config == replace(
        defaults,
        data_dir=Path("/var/lib/millrace"),
        store=replace(defaults.store, flush="async"),
        mqtt=replace(defaults.mqtt, listen=HostPort("::", 1884)),
        pop=replace(defaults.pop, retry_backoff_ms=(1000, 5000)),
    )


def test_overrides_count_more_than_the_file_and_none_counts_nothing(tmp_path: Path) -> None:
    text = 'data_dir = "a"\n[mqtt]\nlisten = "localhost:1"\n[admin]\nlisten = "localhost:2"\n'
    overrides = {"data_dir": Path("b"), "mqtt.listen": "localhost:3", "admin.listen": None, "pop.listen": HostPort("::1", 0)}
    config = load(tmp_path, text, **overrides)
    assert config.data_dir == Path("b")
    assert str(config.mqtt.listen) == "localhost:3"
    assert str(config.admin.listen) == "localhost:2"
    assert str(config.pop.listen) == "[::1]:0"


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[store]\nsegment_byte = 1", r"unknown option store\.segment_byte; .* store\.segment_bytes"),
        ("datadir = 'x'", r"unknown option datadir; .* data_dir"),
        ("flush = 'sync'", r"unknown option flush; .* store\.flush"),
        ("[stor]\nflush = 'sync'", r"unknown section \[stor\]; .* \[store\]"),
        ("store = 5", r"store is 5, but must be a section, \[store\]"),
        ("[store.flush]\nmode = 1", r"store\.flush is \{'mode': 1\}, but must be \"sync\" or \"async\""),
        ("[store]\nflush = 'never'", r"store\.flush is 'never', but must be \"sync\" or \"async\""),
        ("[store]\nflush = ['sync']", r"store\.flush is \['sync'\], but"),
        ("[store]\nsegment_bytes = 1_048_575", r"store\.segment_bytes is 1048575, .* an integer from 1048576 to 4294967296"),
        ("[store]\nsegment_bytes = 4_294_967_297", r"store\.segment_bytes is 4294967297, but"),
        ("[store]\nsegment_bytes = '1 GiB'", r"store\.segment_bytes is '1 GiB', but must be an integer"),
        ("[store]\nsegment_bytes = 2e6", r"store\.segment_bytes is 2000000\.0, but must be an integer"),
        ("[timer]\ntick_ms = true", r"timer\.tick_ms is True, but must be an integer"),
        ("[mqtt]\nlisten = 1883", r"mqtt\.listen is 1883, but must be an address"),
        ("[mqtt]\nlisten = 'localhost:70000'", r"mqtt\.listen is 'localhost:70000', .* port from 0 to 65535"),
        ("[pop]\nretry_backoff_ms = 5", r"pop\.retry_backoff_ms is 5, but must be a list of integers"),
        ("[pop]\nretry_backoff_ms = [1, -1]", r"pop\.retry_backoff_ms is \(1, -1\), but"),
        ("[pop]\nmessages_max = 8", r"pop\.messages_default is 32, but must be at most pop\.messages_max, which is 8"),
        ("[pop]\ninvisible_ms_max = 'a day'", r"pop\.invisible_ms_max is 'a day', but must be an integer"),
        ("data_dir = 7", r"data_dir is 7, but must be a path"),
        ("[store", r"millrace\.toml is not TOML: "),
    ],
)
def test_what_is_wrong_is_named_with_what_would_be_right(tmp_path: Path, text: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        load(tmp_path, text)


def test_an_unknown_override_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"unknown option mqtt\.lisen; .* mqtt\.listen"):
        load_config(None, {"mqtt.lisen": "localhost:0"})


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.toml can't be read: No such file"):
        load_config(tmp_path / "none.toml")


def test_a_file_that_is_not_utf8_is_named(tmp_path: Path) -> None:
    path = tmp_path / "latin.toml"
    path.write_bytes(b'data_dir = "\xe9"')
    with pytest.raises(ConfigError, match=r"latin\.toml is not TOML"):
        load_config(path)


# --- defaults and their documentation -------------------------------------------------------------------------------


@pytest.mark.parametrize("section", SECTIONS)
def test_the_defaults_are_within_their_own_bounds(section: str) -> None:
    check_options(SECTIONS[section](), section)


def test_bounds_do_not_bind_code_that_makes_the_options_itself() -> None:
    assert StoreOptions(segment_bytes=4096).segment_bytes == 4096


def test_the_documented_defaults_load_back_as_the_defaults(tmp_path: Path) -> None:
    assert load(tmp_path, document_options()) == Config()


def test_a_documented_configuration_loads_back_as_the_same(tmp_path: Path) -> None:
    defaults = Config()
    config = replace(
        defaults,
        data_dir=Path('a "quoted"\\ \x7f\N{SNOWMAN}\N{GRINNING FACE}\n directory'),
        mqtt=replace(defaults.mqtt, listen=HostPort("::1", 0)),
        pop=replace(defaults.pop, retry_backoff_ms=(0, 10, 20)),
        log=replace(defaults.log, format="json"),
    )
    text = document_options(config)
    assert load(tmp_path, text) == config
    assert '# An address, HOST:PORT. Default: "127.0.0.1:1883"\nlisten = "[::1]:0"' in text


def test_every_option_is_documented() -> None:
    text = document_options()
    for section in SECTIONS.values():
        for declared in fields(section):
            assert f"\n{declared.name} = " in text
            assert bounds_of(declared).doc.endswith(".")
