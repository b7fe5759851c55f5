"""Key files and allow-lists: what is written and read, and what is refused without showing a secret."""

import errno
import os
from functools import partial
from pathlib import Path

import pytest
import zmq
from click.testing import CliRunner
from zmq.utils import z85

from kvpool.config.curve_keys import KeyPair, make_key_pair, read_allow_list, read_key_file, write_key_file
from kvpool.errors import ConfigError
from kvpool.server.start_checks import read_secret
from kvpool_tools.cli.kvpoolctl import cli

OPTION = "peer.keys"


def _refusal(path: Path) -> str:
    with pytest.raises(ConfigError) as refusal:
        read_key_file(OPTION, str(path))
    assert str(refusal.value).startswith(f"{OPTION} is {str(path)!r}")
    return str(refusal.value)


def _write(path: Path, text: bytes, mode: int = 0o600) -> Path:
    path.write_bytes(text)
    path.chmod(mode)
    return path


def test_a_pair_is_written_for_its_owner_alone_and_read_again(tmp_path: Path) -> None:
    path, pair = tmp_path / "node.key", make_key_pair()
    previous = os.umask(0)
    try:
        write_key_file(str(path), pair)
    finally:
        os.umask(previous)
    assert path.stat().st_mode & 0o7777 == 0o600
    assert read_key_file(OPTION, str(path)) == pair
    assert len(pair.public_bytes) == 32


def test_a_key_file_is_a_certificate_of_zeromq(tmp_path: Path) -> None:
    from zmq.auth import load_certificate

    path, pair = tmp_path / "node.key", make_key_pair()
    write_key_file(str(path), pair)
    assert load_certificate(path) == (pair.public, pair.secret)


def test_a_file_with_the_secret_key_alone_is_a_key_file(tmp_path: Path) -> None:
    public, secret = zmq.curve_keypair()
    assert read_key_file(OPTION, str(_write(tmp_path / "key", secret + b"\n"))) == KeyPair(public, secret)


@pytest.mark.parametrize("there", ["file", "link", "directory"])
def test_nothing_is_overwritten(tmp_path: Path, there: str) -> None:
    path = tmp_path / "node.key"
    if there == "file":
        path.write_bytes(b"precious")
    elif there == "link":
        path.symlink_to(tmp_path / "elsewhere")
    else:
        path.mkdir()
    with pytest.raises(FileExistsError):
        write_key_file(str(path), make_key_pair())
    assert not (tmp_path / "elsewhere").exists()
    assert there != "file" or path.read_bytes() == b"precious"


def test_a_secret_is_in_no_repr() -> None:
    pair = make_key_pair()
    assert pair.secret.decode() not in repr(pair)
    assert pair.secret.decode() not in f"{pair}"
    assert pair.public.decode() in repr(pair)


@pytest.mark.parametrize("mode", [0o604, 0o640, 0o660, 0o601, 0o4604])
def test_a_key_file_that_others_may_open_is_refused(tmp_path: Path, mode: int) -> None:
    path = _write(tmp_path / "a key", make_key_pair().secret, mode)
    assert f"chmod 600 '{path}', and" in _refusal(path)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (b"", "no secret key"),
        (b"\0" * 40, "no key of 40"),
        (b"x" * 39, "no key of 40"),
        (b'public-key = "' + b"x" * 40 + b'"\n', "no secret key"),
        (b'secret-key = "nonsense"\n', "no key of 40"),
        (b"x" * 5000, "more than 4096"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, text: bytes, expected: str) -> None:
    assert expected in _refusal(_write(tmp_path / "key", text))


def test_keys_that_do_not_belong_together_are_refused_without_showing_them(tmp_path: Path) -> None:
    mine, other = make_key_pair(), make_key_pair()
    path = _write(tmp_path / "key", b'public-key = "%b"\nsecret-key = "%b"\n' % (other.public, mine.secret))
    refusal = _refusal(path)
    assert "does not belong" in refusal
    assert mine.secret.decode() not in refusal
    twice = b'secret-key = "%b"\n' % mine.secret * 2
    assert "no secret key" in _refusal(_write(tmp_path / "twice", twice))


@pytest.mark.parametrize("what", ["missing", "link", "directory", "fifo"])
def test_only_regular_files_are_read(tmp_path: Path, what: str) -> None:
    path = tmp_path / "key"
    if what == "link":
        path.symlink_to(_write(tmp_path / "real", make_key_pair().secret))
    elif what == "directory":
        path.mkdir()
    elif what == "fifo":
        os.mkfifo(path, 0o600)
    assert {"missing": "No such file", "link": "symbolic link"}.get(what, "regular file") in _refusal(path)


def test_a_file_whose_reading_fails_is_named() -> None:
    unreadable = "/proc/self/mem"  # a regular file of this user alone, whose first page is no memory
    assert _refusal(Path(unreadable)).endswith(f"which cannot be read: {os.strerror(errno.EIO)}")
    for option, read in (("server.domain_secret_file", read_secret), (OPTION, partial(read_allow_list, OPTION))):
        with pytest.raises(ConfigError, match=f"{option} is '{unreadable}'.*{os.strerror(errno.EIO)}"):
            read(unreadable)


def test_an_allow_list_has_keys_comments_and_empty_lines(tmp_path: Path) -> None:
    keys = [make_key_pair() for _ in range(3)]
    text = b"# nodes\n\n%b  node-a\n  %b\t# node-b\n%b\n%b\n" % (
        keys[0].public,
        keys[1].public,
        keys[2].public,
        keys[0].public,
    )
    found = read_allow_list(OPTION, str(_write(tmp_path / "allowed", text, 0o644)))
    assert found == {z85.decode(pair.public) for pair in keys}


@pytest.mark.parametrize("text", [b"", b"# nobody\n", b"short\n", b"x" * 41 + b"\n", b"\xff" * 40 + b"\n"])
def test_an_allow_list_without_keys_or_with_others_is_refused(tmp_path: Path, text: bytes) -> None:
    path = _write(tmp_path / "allowed", text, 0o644)
    with pytest.raises(ConfigError, match=OPTION) as refusal:
        read_allow_list(OPTION, str(path))
    assert "xxx" not in str(refusal.value)
    assert "short" not in str(refusal.value)


def test_keygen_prints_the_public_key_alone_and_refuses_to_overwrite(tmp_path: Path) -> None:
    path = tmp_path / "node.key"
    made = CliRunner().invoke(cli, ["keygen", str(path)])
    assert made.exit_code == 0, made.output
    pair = read_key_file(OPTION, str(path))
    assert made.output == pair.public.decode() + "\n"
    again = CliRunner().invoke(cli, ["keygen", str(path), "--json"])
    assert again.exit_code == 1
    assert "not overwritten" in again.output
    assert read_key_file(OPTION, str(path)) == pair
    nowhere = CliRunner().invoke(cli, ["keygen", str(tmp_path / "none" / "node.key")])
    assert nowhere.exit_code == 1
    assert "cannot be written" in nowhere.output
