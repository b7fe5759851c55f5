"""The blocking connection against an unusual peer."""

import socket
from pathlib import Path

import pytest

from kvpool.errors import DaemonUnreachable, Refused
from kvpool.protocol import blocking
from kvpool.protocol.records import messages as m


@pytest.mark.parametrize(
    ("answer", "expected"), [(m.Failure("busy", "all in use"), Refused), (None, DaemonUnreachable)]
)
def test_a_refusal_before_the_hello_was_read_keeps_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: m.Failure | None, expected: type[Exception]
) -> None:
    path = str(tmp_path / "socket")
    encode = m.encode
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(path)
        listener.listen()

        def refuse_then_encode(record: object, sequence: int) -> bytes:
            """The peer is gone between the client's connect and its first byte."""
            with listener.accept()[0] as accepted:
                if answer is not None:
                    accepted.sendall(encode(answer, 0))
            return encode(record, sequence)

        monkeypatch.setattr(m, "encode", refuse_then_encode)
        with pytest.raises(expected):
            blocking.BlockingConnection.admin(path, 5.0)
