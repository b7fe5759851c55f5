"""CURVE keys: key pairs in files that their owner alone can read, and allow-lists of public keys.

A key file has the form of ZeroMQ's certificates, which other tools write and read too; the secret key alone, in one line,
is valid as well:

    metadata
    curve
        public-key = "…40 characters…"
        secret-key = "…40 characters…"

An allow-list has a public key at the beginning of each line; the text after it is a comment, and so is a line that begins with
`# ` or is empty. (`#` alone can begin a key.)

A secret is in `KeyPair.secret` and nowhere else: no message, no log line and no `repr` has it. No message repeats what a file
has, because it may be a secret in the wrong place. Any thread.
"""

import binascii
import errno
import os
import re
import stat
import struct
from dataclasses import dataclass, field
from shlex import quote

import zmq
from zmq.utils import z85

from kvpool.errors import ConfigError

KEY_CHARACTERS = 40
PUBLIC_KEY_BYTES = 32
KEY_FILE_MODE = 0o600
# A key file has some hundred bytes; an allow-list of the largest fleet has some ten thousand lines.
KEY_FILE_BYTES_MAX = 4096
ALLOW_LIST_BYTES_MAX = 1 << 20
_OTHERS = 0o077
_FIELD = re.compile(rb'^\s*(public|secret)-key\s*=\s*"([^"\s]*)"\s*$', re.MULTILINE)
_HEAD = "#   kvpool key pair. Keep this file secret; give the public key to the other nodes.\n"


@dataclass(frozen=True, slots=True)
class KeyPair:
    """A public and a secret key, 40 characters (Z85) each."""

    public: bytes
    secret: bytes = field(repr=False)

    @property
    def public_bytes(self) -> bytes:
        """The public key's 32 bytes, as a ZAP request has them."""
        return z85.decode(self.public)


def make_key_pair() -> KeyPair:
    """A new pair, from libsodium's or the kernel's randomness."""
    return KeyPair(*zmq.curve_keypair())


def write_key_file(path: str, pair: KeyPair) -> None:
    """Write a new key file with rights 0600. Raises FileExistsError where anything has the name, or OSError."""
    text = f'{_HEAD}\nmetadata\ncurve\n    public-key = "{pair.public.decode()}"\n    secret-key = "{pair.secret.decode()}"\n'
    made = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC, KEY_FILE_MODE)
    try:
        with os.fdopen(made, "wb") as file:
            os.fchmod(made, KEY_FILE_MODE)
            file.write(text.encode())
            file.flush()
            os.fsync(made)
    except OSError:
        os.unlink(path)
        raise


def read_key_file(option: str, path: str) -> KeyPair:
    """The pair in a key file that `option` names. Raises ConfigError, also where others could read or replace it."""
    text = _read(option, path, bytes_max=KEY_FILE_BYTES_MAX, is_secret=True)
    if len(text.split()) == 1:
        secret = text.strip()
        _check_key(secret, option, path)
        return KeyPair(zmq.curve_public(secret), secret)
    found = dict(_FIELD.findall(text))
    if len(found) != len(_FIELD.findall(text)) or b"secret" not in found:
        raise ConfigError(
            [f"{option} is {path!r}, which has no secret key: expected a file that `kvpoolctl keygen` has written"]
        )
    secret = found[b"secret"]
    _check_key(secret, option, path)
    public = zmq.curve_public(secret)
    if found.get(b"public", public) != public:
        raise ConfigError(
            [f"{option} is {path!r}, whose public key does not belong to its secret key: make a new pair"]
        )
    return KeyPair(public, secret)


def read_allow_list(option: str, path: str) -> frozenset[bytes]:
    """The public keys, 32 bytes each, of an allow-list that `option` names. Raises ConfigError."""
    lines = [line.strip() for line in _read(option, path, bytes_max=ALLOW_LIST_BYTES_MAX).splitlines()]
    keys = [line.split()[0] for line in lines if line and not line.startswith(b"# ")]
    for key in keys:
        _check_key(key, option, path)
    if not keys:
        raise ConfigError([f"{option} is {path!r}, which has no key: nobody could connect"])
    return frozenset(z85.decode(key) for key in keys)


def is_key(text: bytes) -> bool:
    """Whether this is a key: 40 characters of Z85."""
    try:
        return len(text) == KEY_CHARACTERS and len(z85.decode(text)) == PUBLIC_KEY_BYTES
    except (ValueError, KeyError, struct.error, binascii.Error):
        return False


def _check_key(text: bytes, option: str, path: str) -> None:
    if not is_key(text):
        raise ConfigError(
            [f"{option} is {path!r}, which has a line that is no key of {KEY_CHARACTERS} characters in Z85"]
        )


def _read(option: str, path: str, *, bytes_max: int, is_secret: bool = False) -> bytes:
    """The bytes of a regular file. What is checked is the opened file itself, which nobody can exchange meanwhile."""
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | (os.O_NOFOLLOW if is_secret else 0)
    try:
        opened = os.open(path, flags)
    except OSError as error:
        reason = "is a symbolic link" if is_secret and error.errno == errno.ELOOP else error.strerror
        raise ConfigError([f"{option} is {path!r}, which cannot be read: {reason}"]) from error
    try:
        found = os.fstat(opened)
        if not stat.S_ISREG(found.st_mode):
            raise ConfigError([f"{option} is {path!r}, expected a regular file"])
        if is_secret:
            _check_rights(option, path, found)
        text = os.read(opened, bytes_max + 1)
    except OSError as error:
        raise ConfigError([f"{option} is {path!r}, which cannot be read: {error.strerror}"]) from error
    finally:
        os.close(opened)
    if len(text) > bytes_max:
        raise ConfigError([f"{option} is {path!r}, which has more than {bytes_max} bytes: no file of keys"])
    return text


def _check_rights(option: str, path: str, found: os.stat_result) -> None:
    mode = stat.S_IMODE(found.st_mode)
    if mode & _OTHERS:
        raise ConfigError(
            [
                f"{option} is {path!r} with rights {mode:04o}, expected 0600 or less: chmod 600 {quote(path)}, and make a "
                "new pair if somebody may have read it"
            ]
        )
    if found.st_uid not in (os.geteuid(), 0):
        raise ConfigError([f"{option} is {path!r} of uid {found.st_uid}, expected uid {os.geteuid()} or root"])
