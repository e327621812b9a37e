"""The configuration: what is read from TOML, what is refused, and how the options are documented."""

from __future__ import annotations

import re
import tomllib
from dataclasses import fields, is_dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.cli.main import main
from penstock.gateway.options import AccessOptions, ListenerOptions
from penstock.node.config import OPTION_SECTIONS, SECTIONS, Config, known_options, load_config
from penstock.node.document import document_options, toml_of
from penstock.node.errors import ConfigError
from penstock.node.removedoptions import REPLACEMENTS, describe_removed
from penstock.node.variables import read_variables, variable_of
from penstock.store.durations import format_duration, parse_duration
from penstock.store.options import HostPort, OptionInvalid, StoreOptions, check_options, operator_name, options_of
from penstock.store.space.quotaoptions import QuotaLimitOptions

LISTS = {"mqtt.listeners": ListenerOptions, "quotas.limits": QuotaLimitOptions}
"""The dataclasses of tables in lists."""


def declaring(section: str) -> Any:
    """Return the dataclass of a section, or of a table in a list."""
    return {"": Config, **SECTIONS, **LISTS}[section]


def load(tmp_path: Path, text: str, **overrides: Any) -> Config:
    path = tmp_path / "penstock.toml"
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
def test_text_that_is_not_an_address_is_refused(text: str) -> None:
    with pytest.raises(OptionInvalid, match="HOST:PORT") as caught:
        HostPort.parse(text)
    assert caught.value.value == text


@pytest.mark.slow
@given(st.text())
def test_any_text_is_parsed_or_refused(text: str) -> None:
    try:
        address = HostPort.parse(text)
    except OptionInvalid:
        return
    assert HostPort.parse(str(address)) == address


# --- loading --------------------------------------------------------------------------------------------------------


def test_without_a_file_every_option_has_its_default() -> None:
    assert load_config() == Config()


def test_a_file_changes_only_the_options_that_it_names(tmp_path: Path) -> None:
    config = load(
        tmp_path,
        """
        data_dir = "/var/lib/penstock"
        [store]
        flush = "async"
        [mqtt]
        listen = "[::]:1884"
        [pop]
        retry_backoff = ["1s", "5000ms"]
        """,
    )
    defaults = Config()
    assert config == replace(
        defaults,
        data_dir=Path("/var/lib/penstock"),
        store=replace(defaults.store, flush="async"),
        mqtt=replace(defaults.mqtt, listen=HostPort("::", 1884)),
        pop=replace(defaults.pop, retry_backoff_ms=(1000, 5000)),
    )


def test_overrides_replace_values_of_the_file_and_none_is_ignored(tmp_path: Path) -> None:
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
        ("[store]\nsegment_byte = 1", r"The option store\.segment_byte does not exist\. .* store\.segment_bytes"),
        ("data_dir = ''", r"data_dir is '', but must be a path"),
        ("datadir = 'x'", r"The option datadir does not exist\. .* data_dir"),
        ("flush = 'sync'", r"The option flush does not exist\. .* store\.flush"),
        ("[stor]\nflush = 'sync'", r"The section \[stor\] does not exist\. .* \[store\]"),
        ("[nix]\na = 1", r"The section \[nix\] does not exist\. `penstock serve --print-config` shows all options\.$"),
        ("[store]\nnix = 1", r"The option store\.nix does not exist\. `penstock serve --print-config` shows"),
        ("store = 5", r"store is 5, but it must be a section, \[store\]"),
        ("[store.flush]\nmode = 1", r"store\.flush is \{'mode': 1\}, but must be \"sync\" or \"async\""),
        ("[store]\nflush = 'never'", r"store\.flush is 'never', but must be \"sync\" or \"async\""),
        ("[store]\nflush = ['sync']", r"store\.flush is \['sync'\], but"),
        ("[store]\nsegment_bytes = 1_048_575", r"store\.segment_bytes is 1048575, .* an integer from 1048576 to 4294967296"),
        ("[store]\nsegment_bytes = 4_294_967_297", r"store\.segment_bytes is 4294967297, but"),
        ("[store]\nsegment_bytes = '1 GiB'", r"store\.segment_bytes is '1 GiB', but must be an integer"),
        ("[store]\nsegment_bytes = 2e6", r"store\.segment_bytes is 2000000\.0, but must be an integer"),
        ("[mqtt]\ninflight_max = true", r"mqtt\.inflight_max is True, but must be an integer"),
        ("[mqtt]\nlisten = 1883", r"mqtt\.listen is 1883, but must be an address, HOST:PORT, or \"off\""),
        ("[mqtt]\nlisten = 'localhost:70000'", r"mqtt\.listen is 'localhost:70000', .* port from 0 to 65535"),
        ("[pop]\nretry_backoff = 5", r"pop\.retry_backoff is 5, but must be a list of durations, each from 0 to 30d"),
        ("[pop]\nretry_backoff = ['1s', '-1s']", r"pop\.retry_backoff is '-1s', but must be a duration that is not negative"),
        ("[pop]\nretry_backoff = ['1s', '31d']", r"pop\.retry_backoff is \('1s', '31d'\), but must be a list of durations"),
        (
            "[pop]\nmessage_bytes_max = 33_554_432\nmemory_bytes_max = 134_217_728",
            r"pop\.message_bytes_max is 33554432, but must be at most 16777216, an eighth of pop\.memory_bytes_max",
        ),
        (
            "[pop]\ninvisible_default = 'a day'",
            r"pop\.invisible_default is 'a day', .* a duration with a unit, such as \"1m\"",
        ),
        ("[pop]\ninvisible_default = '13h'", r"pop\.invisible_default is '13h', but must be a duration from 1ms to 12h"),
        ("[store]\nretention = 259200", r"store\.retention is 259200, but must be a duration with a unit, such as \"3d\""),
        ("[store]\nretention = '-1s'", r"store\.retention is '-1s', but must be a duration that is not negative"),
        ("[store]\nretention = true", r"store\.retention is True, but must be a duration with a unit"),
        ("[mqtt]\nsys_interval = '1500ms'", r"mqtt\.sys_interval is '1500ms', but must be a whole number of seconds"),
        ("[quotas]\ntenant = 'group'", r"quotas\.tenant is 'group', but must be \"none\" or \"user\" or"),
        ("[quotas]\nshare_percent = 200", r"quotas\.share_percent is 200, but must be an integer from 0 to 100"),
        (
            "[[quotas.limits]]\nof = 'tenant'\nqueues = 1",
            r"quotas\.tenant is 'none', but must be \"user\" or \"topic\", because",
        ),
        ("[[quotas.limits]]\nof = 'group'\nqueues = 1", r"\.of is 'group', but must be \"tenant\" or \"user\""),
        ("[[quotas.limits]]\nof = 'client'", r"\.queues is 0, but must be above 0, or another one of sessions, "),
        ("[[quotas.limits]]\nname = ''\nqueues = 1", r"\.name is '', but must be a pattern"),
        ("[[quotas.limits]]\nretained = -1", r"\.retained is -1, but must be an integer from 0"),
        ("[[quotas.limits]]\nqueue = 1", r"\.queue does not exist\. .*\.queues"),
        ("[[quotas.limits]]\nnix = 1", r"\.nix does not exist\. The options of quotas\.limits\[0\] are of, name, "),
        ("[[quotas.limits]]\nof = 'source'\nname = '::1'\nqueues = 1", r"\.name is '::1', but must be 'local', which is how"),
        ("[[quotas.limits]]\nof = 'source'\nname = 'press'\nqueues = 1", r"\.name is 'press', but must be an IPv4 address, "),
        ("[[quotas.limits]]\nof = 'source'\nname = '10.0.0.0/8'\nqueues = 1", r"\.name is '10.0.0.0/8', but must be an IPv4"),
        ("[[quotas.limits]]\nof = 'source'\nname = '2001:db8::7'\nqueues = 1", r" must be '2001:db8::/64', which is how"),
        ("data_dir = 7", r"data_dir is 7, but must be a path"),
        ("[store", r"penstock\.toml is not valid TOML: "),
    ],
)
def test_an_error_names_the_option_and_what_is_allowed(tmp_path: Path, text: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        load(tmp_path, text)


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("store.retention_ms", r'store\.retention with a unit, such as retention = "3d"\.'),
        ("pop.retry_backoff_ms", r'pop\.retry_backoff with a unit, such as retry_backoff = \["1s", "2s", '),
        ("mqtt.keep_alive_s_max", r'mqtt\.keep_alive_max with a unit, such as keep_alive_max = "7d"\.'),
        ("pop.invisible_default_ms", r'pop\.invisible_default with a unit, such as invisible_default = "1m"\.'),
        ("mqtt.keep_alive_max_s", r"mqtt\.keep_alive_max with a unit"),
        ("mqtt.limits.strike_window_ms", r"it is always 1m\."),
        ("store.sync_in", r"it is always process\."),
        ("store.route_cache_max", r"it is always 100000\."),
        ("clock.confirm_ms", r"it is always 10m\."),
        ("clock.gap_max", r"it is always 1d; "),
        ("pop.invisible_max", r"it is always 12h\."),
        ("pop.responses_bytes_max", r"say pop\.memory_bytes_max, an eighth"),
        ("mqtt.shared", r"say mqtt\.shared_max = 0"),
        ("timer.keys_max", r"say timer\.pending_max, a tenth of which"),
        ("pop.tls_key_file", r"say pop\.key_file\."),
        ("admin.client_ca", r"say admin\.client_ca_file\."),
    ],
)
def test_an_option_that_is_no_more_is_refused_with_what_replaces_it(name: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=rf"^The option {re.escape(name)} does not exist any more: .*{complaint}"):
        load_config(None, {name: 1})


def test_each_replacement_of_an_option_exists() -> None:
    known = {f"{section}.{option.name}" for section in (*SECTIONS, *LISTS) for option in options_of(declaring(section))}
    for section, declared in SECTIONS.items():
        for bounded in (each for each in fields(declared) if "reason" in each.metadata):
            assert describe_removed(f"{section}.{bounded.name}", SECTIONS), bounded.name
            assert f"{section}.{operator_name(bounded.name)}" not in known
    for name, text in REPLACEMENTS.items():
        assert name not in known
        named = re.findall(r"\b(?:store|mqtt|pop|timer|admin|replication)\.[a-z_.]*[a-z_]", text)
        assert {each for each in named if each not in known} == set()


def test_an_unknown_override_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"The option mqtt\.lisen does not exist\. .* mqtt\.listen"):
        load_config(None, {"mqtt.lisen": "localhost:0"})


def test_an_override_may_be_a_timedelta() -> None:
    config = load_config(None, {"store.retention": timedelta(days=7), "mqtt.sys_interval": timedelta(0)})
    assert (config.store.retention_ms, config.mqtt.sys_interval_s) == (604_800_000, 0)


def test_each_option_can_be_given_as_a_variable() -> None:
    environment = {"PENSTOCK_TARGET": "of a client", "OTHER__X": "of another program"}
    for name, option in known_options().items():
        if option.default is not None:
            value = option.written(option.default)
            is_text = isinstance(value, str | Path | HostPort)
            environment[variable_of(name)] = str(value) if is_text else toml_of(value)
    assert len(read_variables(environment, known_options(), str.lower)) == len(environment) - 2
    assert load_config(None, None, environment) == Config()


def test_variables_replace_values_of_the_file_and_overrides_replace_both(tmp_path: Path) -> None:
    path = tmp_path / "penstock.toml"
    path.write_text('data_dir = "a"\n[store]\nretention = "1d"\n[mqtt]\nlisten = "localhost:1"\n')
    environment = {
        "PENSTOCK_DATA_DIR": "b",
        "PENSTOCK_STORE__RETENTION": "7d",
        "PENSTOCK_MQTT__LISTEN": "localhost:2",
        "PENSTOCK_MQTT__LIMITS__HOLD_OFF": "2m",
        "PENSTOCK_MQTT__LISTENERS": '[{name = "ws", kind = "ws"}]',
        "PENSTOCK_MQTT__SYS_INTERVAL": "0",
        "PENSTOCK_POP__RETRY_BACKOFF": '["1s", "5s"]',
        "PENSTOCK_POP__TLS_OPTIONAL": "true",
        "PENSTOCK_MQTT__ACCESS__PLUGINS": '{"a.B" = {}}',
    }
    config = load_config(path, {"mqtt.listen": "localhost:3"}, environment)
    mqtt, pop = config.mqtt, config.pop
    assert (config.data_dir, config.store.retention_ms) == (Path("b"), 604_800_000)
    assert (str(mqtt.listen), mqtt.limits.hold_off_ms, mqtt.sys_interval_s) == ("localhost:3", 120_000, 0)
    assert (mqtt.listeners[0].name, pop.retry_backoff_ms, pop.tls_optional) == ("ws", (1000, 5000), True)
    assert mqtt.access.plugins == {"a.B": {}}


def test_print_config_shows_what_variables_set(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("PENSTOCK_STORE__RETENTION", "7d")
    assert main(["serve", "--print-config"]) == 0
    assert '\nretention = "7d"\n' in capsys.readouterr().out


@pytest.mark.parametrize(
    ("variable", "text", "complaint"),
    [
        ("STORE__RETENTIONS", "7d", r"The variable PENSTOCK_STORE__RETENTIONS sets no option\. .* PENSTOCK_STORE__RETENTION\."),
        ("store__retention", "7d", r"The variable PENSTOCK_store__retention sets no option\. .* PENSTOCK_STORE__RETENTION\."),
        ("NIX__A", "1", r"The variable PENSTOCK_NIX__A sets no option\. `penstock serve --print-config` shows all options\.$"),
        (
            "STORE__RETENTION_MS",
            "7",
            r"PENSTOCK_STORE__RETENTION_MS sets no option any more: say store\.retention with a unit",
        ),
        ("STORE__RETENTION", "7", r"^PENSTOCK_STORE__RETENTION is '7', but must be a duration with a unit"),
        ("STORE__FLUSH", "never", r"^PENSTOCK_STORE__FLUSH is 'never', but must be \"sync\" or"),
        ("MQTT__INFLIGHT_MAX", "0", r"^PENSTOCK_MQTT__INFLIGHT_MAX is 0, but must be an integer from 1"),
        ("MQTT__INFLIGHT_MAX", "many", r"^PENSTOCK_MQTT__INFLIGHT_MAX is 'many', but must be a value of TOML, such as 100\."),
        ("MQTT__INFLIGHT_MAX", "1\nx = 2", r"must be a value of TOML"),
        ("POP__TLS_OPTIONAL", "yes", r"^PENSTOCK_POP__TLS_OPTIONAL is 'yes', .* such as true\."),
        ("ADMIN__HOSTS", "a,b", r"^PENSTOCK_ADMIN__HOSTS is 'a,b', .* such as \[\"a\", \"b\"\]\."),
        ("MQTT__LISTENERS", '[{name = "a", kind = "udp"}]', r"^PENSTOCK_MQTT__LISTENERS\[0\]\.kind is 'udp'"),
        ("POP__LISTEN", "here", r"^PENSTOCK_POP__LISTEN is 'here', but must be HOST:PORT"),
    ],
)
def test_an_error_about_a_variable_names_it(variable: str, text: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        load_config(None, None, {f"PENSTOCK_{variable}": text})


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.toml can't be read: No such file"):
        load_config(tmp_path / "none.toml")


def test_a_file_that_is_not_utf8_is_named(tmp_path: Path) -> None:
    path = tmp_path / "latin.toml"
    path.write_bytes(b'data_dir = "\xe9"')
    with pytest.raises(ConfigError, match=r"latin\.toml is not valid TOML"):
        load_config(path)


# --- defaults and their documentation -------------------------------------------------------------------------------


@pytest.mark.parametrize("section", SECTIONS)
def test_the_defaults_are_within_their_own_bounds(section: str) -> None:
    check_options(SECTIONS[section](), section)


def test_bounds_do_not_apply_to_options_made_in_code() -> None:
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
    assert '# An address, HOST:PORT, or "off". Default: "127.0.0.1:1883"\nlisten = "[::1]:0"' in text


@pytest.mark.parametrize("name", [*OPTION_SECTIONS, *LISTS])
def test_every_option_is_documented(name: str) -> None:
    text = document_options()
    _, head, section = text.partition(f"[{name}]]\n" if name in LISTS else f"[{name}]\n")
    assert head
    for option in options_of(declaring(name)):
        if f"{name}.{option.name}" not in LISTS:
            assert f"\n{option.name} = " in section or f"\n# {option.name} = " in section, option.name
            assert option.bounds.doc.endswith(".")


@pytest.mark.parametrize("name", [*OPTION_SECTIONS, *LISTS])
def test_names_have_no_unit_of_time_and_durations_have_bounds_and_read_back(name: str) -> None:
    declared = options_of(declaring(name))
    assert len({option.name for option in declared}) == len(declared)
    for option in declared:
        assert not re.search(r"(?<!_per)_(ms|s|h|d)(_|$)|_seconds|_minutes|_hours|_days", option.name), option.name
        assert option.read(option.written(option.default), option.name) == option.default
        if option.hint is int or option.listed is int:
            assert option.bounds.minimum is not None, option.name
        if option.unit_ms:
            assert option.bounds.maximum is not None, option.name


@pytest.mark.parametrize(
    ("text", "ms"), [("1ms", 1), ("1500ms", 1500), ("90s", 90_000), ("15m", 900_000), ("12h", 43_200_000), ("7d", 604_800_000)]
)
def test_a_duration_is_read_and_written_in_its_shortest_form(text: str, ms: int) -> None:
    assert parse_duration(text) == ms
    assert format_duration(ms) == text
    assert parse_duration(f"{ms}ms") == ms


@pytest.mark.parametrize(
    "text", ["", "7", "d", "-1s", "1.5h", "1 h", "7D", "1h30m", "1w", "\N{FULLWIDTH DIGIT ONE}s", "1" * 16 + "s"]
)
def test_text_that_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="such as 10m"):
        parse_duration(text)


EXAMPLE = Path(__file__).parents[2] / "docs" / "penstock.toml"


def test_the_example_has_each_option_and_the_default_of_those_in_comments() -> None:
    section, shown = "", set()
    for line in EXAMPLE.read_text("utf-8").splitlines():
        if found := re.fullmatch(r"(?:# )?\[\[?([a-z_.]+)\]\]?", line):
            section = found[1]
        elif found := re.match(r"(# )?([a-z_]+) = ", line):
            name = f"{section}.{found[2]}".removeprefix(".")
            (option,) = (each for each in options_of(declaring(section)) if each.name == found[2])
            if found[1]:
                ((_, value),) = tomllib.loads(line.removeprefix("# ")).items()
                assert option.read(value, name) == ({} if option.default is None else option.default), name
            shown.add(name)
    lists = {name for name, option in known_options().items() if is_dataclass(option.listed)}
    of_tables = {f"{name}.{option.name}" for name in LISTS for option in options_of(LISTS[name])}
    assert shown == (known_options().keys() - lists) | of_tables


# --- sections in sections, lists of tables, tables of a library ---------------------------------------------------------

LISTENERS = """
[mqtt]
inflight_max = 5
[mqtt.limits]
strikes_max = 7
[[mqtt.listeners]]
name = "tls"
kind = "tls"
listen = "[::1]:8883"
certificate_file = "server.pem"
key_file = "server.key"
[[mqtt.listeners]]
name = "local"
kind = "unix"
socket = "/run/penstock.sock"
socket-mode = 0o600
proxy_from = ["10.0.0.0/8", "::1"]
[mqtt.access.plugins."amqtt.plugins.authentication.FileAuthPlugin"]
password_file = "passwords"
"""


def test_sections_may_hold_sections_and_lists_of_tables(tmp_path: Path) -> None:
    mqtt = load(tmp_path, LISTENERS).mqtt
    tls, local = mqtt.listeners
    assert (mqtt.inflight_max, mqtt.limits.strikes_max, mqtt.limits.hold_off_ms) == (5, 7, 60_000)
    assert (tls.name, tls.kind, tls.listen, tls.certificate_file) == ("tls", "tls", HostPort("::1", 8883), "server.pem")
    assert (local.socket, local.socket_mode, local.proxy_from) == ("/run/penstock.sock", 0o600, ("10.0.0.0/8", "::1"))
    assert mqtt.access.plugins == {"amqtt.plugins.authentication.FileAuthPlugin": {"password_file": "passwords"}}


def test_documented_sections_and_lists_load_back_as_the_same(tmp_path: Path) -> None:
    config = load(tmp_path, LISTENERS)
    assert load(tmp_path, document_options(config)) == config


def test_documented_tables_of_a_library_load_back_as_the_same(tmp_path: Path) -> None:
    plugins = {"a.B": {"on": True, "rate": 0.5, "names": ["x", "y"], "acl": {'a "user"': ["#", "+/b"]}}, "c": {}}
    config = replace(Config(), mqtt=replace(Config().mqtt, access=AccessOptions(plugins=plugins)))
    assert load(tmp_path, document_options(config)).mqtt.access.plugins == plugins


def test_a_section_of_amqtt_may_be_spelled_with_dashes_and_keeps_its_content(tmp_path: Path) -> None:
    table = {"enabled": True, "publish-acl": {"a": ["b"]}}
    for name in ("topic-check", "topic_check"):
        access = load(tmp_path, f"[mqtt.access.plugins.{name}]\nenabled = true\npublish-acl = {{a = ['b']}}").mqtt.access
        assert access.older_plugins == {"topic-check": table}


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[mqtt.limit]\nstrikes_max = 1", r"The option mqtt\.limit does not exist\. .* mqtt\.lim"),
        ("[mqtt.limits]\nstrike_max = 1", r"The option mqtt\.limits\.strike_max does not exist\. .* mqtt\.limits\.strikes_max"),
        ("[mqtt]\nlimits = 3", r"mqtt\.limits is 3, but it must be a section"),
        ("[mqtt]\nlisteners = 3", r"mqtt\.listeners is 3, but must be a list of tables"),
        ("[mqtt]\nlisteners = ['tls']", r"mqtt\.listeners is \('tls',\), but must be a list of tables"),
        (
            "[[mqtt.listeners]]\nnam = 'a'",
            r"option mqtt\.listeners\[0\]\.nam does not exist\. .* mqtt\.listeners\[0\]\.name",
        ),
        ("[[mqtt.listeners]]\nkind = 'ws'", r"mqtt\.listeners\[0\]\.name is '', but must be 1 to 32"),
        ("[[mqtt.listeners]]\nname = 'mqtt'", r"mqtt\.listeners\[0\]\.name is 'mqtt'"),
        (
            "[[mqtt.listeners]]\nname = 'a'\n[[mqtt.listeners]]\nname = 'a'",
            r"mqtt\.listeners\.name is 'a', but must be unique",
        ),
        ("[[mqtt.listeners]]\nname = 'a'\nkind = 'udp'", r"mqtt\.listeners\[0\]\.kind is 'udp', but must be \"tcp\" or"),
        ("[[mqtt.listeners]]\nname = 'a'\nkind = 'unix'", r"listeners\[0\]\.socket is '', but must be a path"),
        ("[[mqtt.listeners]]\nname = 'a'\nkind = 'wss'", r"listeners\[0\]\.certificate_file is '', but must be a path"),
        ("[pop]\nclient_ca_file = 'ca.pem'", r"pop\.certificate_file is '', but .* no client shows a certificate"),
        ("[pop]\ncertificate_file = 'a.pem'", r"pop\.key_file is '', but must be a path"),
        ("[pop]\nkey_file = 'a.key'", r"pop\.certificate_file is '', but must be a path"),
        ("[admin]\nclient_ca_file = 'ca.pem'", r"admin\.client_ca_file is 'ca\.pem', but must be empty if client_certificates"),
        ("[[mqtt.listeners]]\nname = 'a'\nclient_ca_file = 'ca.pem'", r"client_ca_file is 'ca\.pem', but must be empty"),
        (
            "[[mqtt.listeners]]\nname = 'a'\nclient_certificates = 'required'",
            r"client_certificates is 'required', but .* without TLS",
        ),
        ("[[mqtt.listeners]]\nname = 'a'\nusername_from = 'cn'", r"username_from is 'cn', but must be \"none\" if"),
        ("[[mqtt.listeners]]\nname = 'a'\nproxy_from = ['10.0.0.1/8']", r"proxy_from is '10\.0\.0\.1/8', but must be networks"),
        ("[[mqtt.listeners]]\nname = 'a'\nproxy_from = [10]", r"proxy_from is \(10,\), but must be a list of strings"),
        ("[[mqtt.listeners]]\nname = 'a'\nsocket_mode = 0o1000", r"socket_mode is 512, but must be an integer from 0 to 511"),
        ("[mqtt]\nlisten = 'off'", r"mqtt\.listen is 'off', but must be an address if there is no other listener"),
        ("[mqtt.access]\nplugins = 1", r"mqtt\.access\.plugins is 1, but must be a table"),
        ("[mqtt.access.plugins]\n'a.B' = {}\nauth = {}", r"mqtt\.access\.plugins is \['a\.B', 'auth'\], .* amqtt would ignore"),
    ],
)
def test_an_error_in_a_nested_section_or_list_names_the_option(tmp_path: Path, text: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        load(tmp_path, text)
