"""Settings: where the value of each option was written."""

import json
from pathlib import Path

import pytest

from kvpool.config.config import OPTIONS, load_config
from kvpool.config.settings import Setting, lines_of

FILE = Path(__file__).parents[3] / "configs" / "kvpool.toml"


def test_an_option_has_its_value_as_written_and_the_place(tmp_path: Path) -> None:
    path = tmp_path / "kvpool.toml"
    path.write_text('# sizes\n[dram]\n\ncapacity = "128MiB"  # enough\nprefault = false\n[log]\nlevel = "debug"\n')
    settings = load_config(str(path), ["log.level=error", "log.level=warning"]).settings
    assert set(settings) == set(OPTIONS)
    assert settings["dram.capacity"] == Setting("128MiB", f"{path}:4")
    assert settings["dram.prefault"] == Setting(False, f"{path}:5")
    assert settings["log.level"] == Setting("warning", "--set")
    assert settings["dram.segment"] == Setting("64MiB", "default")


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ('log.level = "info"', {"log.level": 1}),
        ('log = { level = "info" }', {"log": 1, "log.level": 1}),
        ('[ "log" ]\n"level" = "info"', {"log.level": 2}),
        ('[peer]\nmembers = [\n  "a",\n  "b",\n]\nname = "n"', {"peer.members": 2, "peer.name": 6}),
        ('[log]\r\nlevel = "info"\r\n', {"log.level": 2}),
        ('[events]\ntopic = """\nlevel = 1\n"""\npublish = "off"', {"events.topic": 2, "events.publish": 5}),
        ('#[log]\n#level = "x"\n', {}),
        ("", {}),
    ],
)
def test_the_line_of_an_option_is_found_in_every_form_of_toml(text: str, lines: dict[str, int]) -> None:
    assert lines_of(text) == lines


def test_every_option_of_the_shipped_file_is_found_on_its_line() -> None:
    text = "\n".join(line.removeprefix("#") if line[1:2].isalpha() else line for line in FILE.read_text().split("\n"))
    lines = lines_of(text)
    assert set(OPTIONS) <= set(lines)
    for name in OPTIONS:
        assert text.split("\n")[lines[name] - 1].startswith(name.partition(".")[2])


def test_settings_can_be_sent_and_printed() -> None:
    assert json.dumps({name: setting.value for name, setting in load_config(None).settings.items()})
