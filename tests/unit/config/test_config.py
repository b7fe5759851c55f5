"""Configuration: defaults and file agree, faults come all at once, the last override wins."""

import os
import re
from pathlib import Path

import pytest

from kvpool.config.config import OPTIONS, load_config
from kvpool.errors import ConfigError

FILE = Path(__file__).parents[3] / "configs" / "kvpool.toml"


def _written_options(text: str) -> dict[str, str]:
    options, section = {}, ""
    for line in text.splitlines():
        header = re.fullmatch(r"\[(\w+)\]", line)
        option = re.fullmatch(r"#(\w+) = (.+)", line)
        section = header.group(1) if header else section
        if option:
            options[f"{section}.{option.group(1)}"] = option.group(2).strip('"')
    return options


def test_the_file_explains_every_option_at_its_default() -> None:
    assert _written_options(FILE.read_text()) == {name: option.default for name, option in OPTIONS.items()}


def test_the_file_is_the_defaults_with_and_without_its_comments(tmp_path: Path) -> None:
    bare = tmp_path / "bare.toml"
    bare.write_text(re.sub(r"(?m)^#(\w+ = )", r"\1", FILE.read_text()))
    assert load_config(str(FILE)) == load_config() == load_config(str(bare))


def test_every_fault_is_reported_at_once(tmp_path: Path) -> None:
    path = tmp_path / "bad.toml"
    path.write_text('[server]\nlease_ttl = "1y"\nsockett = "x"\n[dram]\ncapacity = "12 parsecs"\nprefault = 3\n')
    with pytest.raises(ConfigError) as refusal:
        load_config(str(path), ["log.level=loud", "dram.segment", " =x", "dram.prefault_threads=0"])
    faults = "\n".join(refusal.value.faults)
    assert len(refusal.value.faults) == 8
    for part in (
        "server.lease_ttl is '1y', expected a duration",
        "server.sockett is no option, did you mean server.socket?",
        "dram.capacity is '12 parsecs', expected a size from 64KiB to 4TiB, in B, KiB, MiB, GiB or TiB",
        "dram.prefault is 3, expected true or false",
        "log.level is 'loud', expected one of info",
        "--set dram.segment: expected section.key=value",
        "--set  =x: expected section.key=value",
        "dram.prefault_threads is '0', expected an integer from 1 to 64",
    ):
        assert part in faults


def test_the_last_override_wins_over_the_file(tmp_path: Path) -> None:
    path = tmp_path / "good.toml"
    path.write_text('[dram]\ncapacity = "2GiB"\nprefault = true\n')
    config = load_config(str(path), ["dram.capacity=3GiB", "dram.prefault=false", "dram.capacity=4GiB"])
    assert config.dram.capacity == 4 << 30
    assert config.dram.prefault is False


@pytest.mark.parametrize(
    "override",
    [
        "server.socket=relative.sock",
        "server.socket=/" + "x" * 120,
        "server.socket_mode=0666",
        "server.socket_mode=0060",
        "server.socket_mode=nine",
        "server.metrics=9469",
        "server.metrics=127.0.0.1",
        "server.metrics=127.0.0.1:65536",
        "server.metrics=10.0.0.1:9469",
        "server.metrics=0.0.0.0:9469",
        "server.metrics=[::]:9469",
        "server.metrics=::1:9469",
        "server.metrics=[127.0.0.1]:9469",
        "server.metrics=localhost:9469",
        "server.metrics=on",
        "server.lease_ttl=30",
        "server.lease_ttl=9ms",
        "server.max_connections=-1",
        "server.domain_secret_file=/dev/null",
        "server.domain_secret_file=/nowhere",
        "events.publish=tcp://0.0.0.0:5557",
        "events.publish=tcp://*:5557",
        "events.publish=tcp://[::]:5557",
        "events.publish=tcp://[::ffff:0.0.0.0]:5557",
        "events.publish=tcp://localhost:5557",
        "events.publish=tcp://eth0:5557",
        "events.publish=tcp://127.0.0.1",
        "events.publish=tcp://127.0.0.1:*",
        "events.publish=tcp://127.0.0.1:65536",
        "events.publish=udp://127.0.0.1:5557",
        "events.publish=ipc://relative",
        "events.publish=ipc://@abstract",
        "events.publish=ipc:///" + "x" * 120,
        "events.publish=on",
        "events.publish=tcp://192.0.2.1:5557",
        "events.publish=tcp://[2001:db8::1]:5557",
        "events.replay=tcp://127.0.0.1:5558",
        "events.models=llama",
        "events.models=llama off",
        "events.models=llama tcp://localhost:5557",
        "events.models=llama ipc:///a ipc:///b ipc:///c",
        "events.models=llama ipc:///a, llama ipc:///b",
        "events.models=llama ipc:///a,",
        "events.models=" + ", ".join(f"m{number} ipc:///{number}" for number in range(17)),
        "events.topic=kv@{pod}",
        "events.topic=kv@{name.x}",
        "events.topic=kv@{name!r}",
        "events.topic={",
        "events.topic={0}",
        "events.topic=" + "x" * 201,
        "events.format=array",
        "events.block_tokens=-1",
        "events.buffer=63KiB",
        "events.queue_messages=0",
        "events.keys=/nowhere",
        "events.allow=/nowhere",
        "dram.capacity=63KiB",
        "dram.capacity=-1",
        "dram.capacity=1e9",
        "dram.huge_pages=maybe",
        "dram.verify=never",
        "ssd.write_budget=3 DPWD",
        "ssd.write_budget=DWPD",
        "ssd.write_budget=-1 DWPD",
        "ssd.write_budget=0 DWPD",
        "ssd.write_budget=1001 DWPD",
        "ssd.write_budget=9000TiB",
        "ssd.write_budget=",
    ],
)
def test_a_value_out_of_range_is_refused_by_name(override: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        load_config(None, [override])
    assert refusal.value.faults[0].startswith(override.partition("=")[0])


def test_models_have_endpoints_of_their_own() -> None:
    text = "llama@a1 ipc:///llama ipc:///llama-replay,\nqwen/7b ipc:///qwen"
    config = load_config(None, ["events.publish=ipc:///events", f"events.models={text}"])
    assert [str(one) for one in config.events.models] == text.replace(",\n", ",").split(",")
    assert config.events.models[1].replay is None
    assert config.events.descriptors == 4 * load_config(None, ["events.publish=ipc:///events"]).events.descriptors


@pytest.mark.parametrize(
    ("overrides", "fault"),
    [
        (["events.models=llama ipc:///llama"], "events.models is llama ipc:///llama, expected none"),
        (
            ["events.publish=ipc:///events", "events.models=llama ipc:///events"],
            "events.models is /events, expected another path than that of events.publish",
        ),
        (
            ["events.publish=ipc:///events", "events.models=llama ipc:///a ipc:///a"],
            "events.models is /a, expected another path than that of events.models",
        ),
        (
            ["events.publish=ipc:///events", "events.models=llama tcp://127.0.0.1:5557"],
            "events.models is tcp://127.0.0.1:5557, where every user of this machine could read prompts",
        ),
    ],
)
def test_endpoints_of_models_that_cannot_be_are_named(overrides: list[str], fault: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        load_config(None, overrides)
    assert refusal.value.faults[0].startswith(fault)


@pytest.mark.parametrize(
    ("written", "per_day"),
    [
        ("0B", 0),
        ("3TiB", 3 << 40),
        ("3 DWPD", 3 << 40),
        ("3dwpd", 3 << 40),
        (" 0.3 DWPD ", int(0.3 * (1 << 40))),
        ("0.001 DWPD", (1 << 40) // 1000),
        ("1000 DWPD", 1000 << 40),
    ],
)
def test_a_write_budget_is_bytes_or_drive_writes_of_the_tier(written: str, per_day: int) -> None:
    config = load_config(None, ["ssd.path=/ssd", f"ssd.write_budget={written}", "ssd.capacity=1TiB"])
    assert config.ssd.write_budget_bytes == per_day


@pytest.mark.parametrize("address", ["127.0.0.1:9469", "127.8.1.1:65535", "[::1]:9469", "[::1]:0"])
def test_metrics_take_a_loopback_address(address: str) -> None:
    assert str(load_config(None, [f"server.metrics={address}"]).server.metrics) == address
    assert load_config(None, [f"server.metrics={address}", "server.metrics=off"]).server.metrics is None


def test_events_beyond_this_machine_need_keys(tmp_path: Path) -> None:
    secret, clients = tmp_path / "secret", tmp_path / "clients"
    secret.write_bytes(b"s" * 40)
    secret.chmod(0o600)
    clients.write_bytes(b"c" * 40)
    keys = [f"events.keys={secret}", f"events.allow={clients}"]
    for address in ("tcp://192.0.2.1:5557", "tcp://[2001:db8::1]:5557"):
        events = [f"events.publish={address}", f"events.replay={address[:-1]}8"]
        assert str(load_config(None, [*events, *keys]).events.publish) == address
        with pytest.raises(ConfigError) as refusal:
            load_config(None, events)
        assert len([fault for fault in refusal.value.faults if "there are no CURVE keys" in fault]) == 2
    for one in keys:
        with pytest.raises(ConfigError, match="expected both or none"):
            load_config(None, ["events.publish=tcp://127.0.0.1:0", one])
    secret.chmod(0o644)
    with pytest.raises(ConfigError, match=r"events\.keys"):
        load_config(None, keys)


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:5557", "tcp://[::1]:0"])
def test_loopback_tcp_without_keys_has_to_be_asked_for(address: str) -> None:
    for name in ("publish", "replay"):
        options = ["events.publish=ipc:///run/kvpool/events", f"events.{name}={address}"]
        with pytest.raises(ConfigError) as refusal:
            load_config(None, options)
        (fault,) = refusal.value.faults
        assert fault.startswith(f"events.{name} is {address}, ")
        for way in ("ipc://", "events.keys", "events.insecure = true"):
            assert way in fault
        assert str(getattr(load_config(None, [*options, "events.insecure=true"]).events, name)) == address


def test_insecure_allows_no_address_beyond_this_machine() -> None:
    with pytest.raises(ConfigError, match="there are no CURVE keys"):
        load_config(None, ["events.publish=tcp://192.0.2.1:5557", "events.insecure=true"])


def test_a_directory_in_the_configurations_place_leaves_no_descriptor(tmp_path: Path) -> None:
    before = os.listdir("/proc/self/fd")
    with pytest.raises(ConfigError):
        load_config(str(tmp_path), [])
    assert os.listdir("/proc/self/fd") == before


def test_a_secret_file_must_be_its_owners_alone(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_bytes(b"secret")
    path.chmod(0o644)
    with pytest.raises(ConfigError):
        load_config(None, [f"server.domain_secret_file={path}"])
    path.chmod(0o600)
    assert load_config(None, [f"server.domain_secret_file={path}"]).server.domain_secret_file == str(path)


@pytest.mark.parametrize("content", ["[server\n", "\xff\xfe", "server = 3\n"])
def test_a_file_that_is_no_configuration_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "broken.toml"
    path.write_bytes(content.encode("latin-1"))
    with pytest.raises(ConfigError):
        load_config(str(path))


def test_a_file_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "marked.toml"
    path.write_text('[dram]\ncapacity = "128MiB"\n', encoding="utf-8-sig")
    assert load_config(str(path)).dram.capacity == 128 << 20


def test_a_path_that_is_no_file_or_too_large_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "large").write_bytes(b"#" * ((1 << 20) + 1))
    for name, reason in (("fifo", "no regular file"), ("large", "more than 1048576 bytes"), ("none", "No such file")):
        with pytest.raises(ConfigError, match=reason):
            load_config(str(tmp_path / name), [])


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("dram.capacity", f"{'9' * 400}.0GiB"),
        ("events.topic", "{model.x}"),
        ("events.topic", "{model:>9999999999}"),
        ("events.topic", "{host"),
    ],
)
def test_values_that_raise_in_their_parsers_are_faults(option: str, value: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(option)):
        load_config(None, [f"{option}={value}"])


@pytest.mark.parametrize("content", ["a = " + "[" * 5000, "[dram]\nsegment = " + "9" * 5000])
def test_files_that_raise_in_the_parser_are_faults(tmp_path: Path, content: str) -> None:
    (tmp_path / "odd.toml").write_text(content)
    with pytest.raises(ConfigError):
        load_config(str(tmp_path / "odd.toml"), [])


def test_two_sockets_at_one_path_are_refused_by_name() -> None:
    for options in (
        ["events.publish=ipc:///run/x/events", "events.replay=ipc:///run/x/events"],
        ["server.socket=/run/x/s", "server.metrics_socket=/run/x/s.new"],
        ["server.socket=/run/x/s", "events.publish=ipc:///run/x/s.lock"],
    ):
        with pytest.raises(ConfigError, match=r"expected another path than that of (events.publish|server.socket)"):
            load_config(None, options)


def test_peers_receive_chunks_from_the_host_that_they_ask() -> None:
    with pytest.raises(ConfigError, match="expected the host of"):
        load_config(None, ["peer.listen=tcp://127.0.0.1:9470", "peer.stream=tcp://127.0.0.2:9471"])
    assert load_config(None, ["peer.listen=tcp://127.0.0.1:9470", "peer.stream=tcp://127.0.0.1:0"]).peer.is_used


@pytest.mark.parametrize(
    ("options", "faults"),
    [
        (["dramm.capacity=1GiB"], ["dramm is no section, did you mean dram?; sections are server, hbm, dram, ssd, "]),
        (["tape.size=3", "tape.x=1"], ["tape is no section; sections are server, hbm, "]),
        (["dram.capcity=1GiB"], ["dram.capcity is no option, did you mean dram.capacity?"]),
        (["server=3"], ["server is '3', expected a section: [server], and options below it"]),
        (["ssd.capacity=1MiB", "ssd.path=/x"], ["ssd.capacity is 1MiB, expected 0B or at least 16MiB"]),
        (["dram.segment=8GiB"], ["dram.segment is 8GiB, expected at most dram.capacity, 1GiB"]),
    ],
)
def test_faults_name_sections_and_sizes_as_they_are_written(options: list[str], faults: list[str]) -> None:
    with pytest.raises(ConfigError) as refused:
        load_config(None, options)
    assert len(refused.value.faults) == len(faults)
    for fault, beginning in zip(refused.value.faults, faults, strict=True):
        assert fault.startswith(beginning)


@pytest.mark.parametrize("encoding", ["UTF-16", "UTF-32"])
def test_a_file_in_another_encoding_is_named(tmp_path: Path, encoding: str) -> None:
    path = tmp_path / "wide.toml"
    path.write_text('[dram]\ncapacity = "128MiB"\n', encoding=encoding)
    with pytest.raises(ConfigError, match=f"byte order mark of {encoding}, expected UTF-8: save it as that"):
        load_config(str(path))
