"""Every message between nodes, byte for byte."""

from tests.golden import wire

NEW_MESSAGE = """
This record is new or has changed, and a node of the version before cannot read it: raise NEWEST_VERSION (and OLDEST_VERSION,
where what the older one reads is no longer written) in kvpool/peers/control/records.py, docs/peer-protocol.md and CHANGELOG.md.
Then `python -m tests.golden.wire` writes what this test reads; the file of the version before goes.
"""


def test_every_message_between_nodes_has_its_golden_bytes() -> None:
    assert wire.PEER_FILE.exists(), NEW_MESSAGE
    now = {record.__name__: (wire.head_of(record), wire.peer_message(record)) for record in wire.peer_records()}
    assert wire.golden_frames(wire.PEER_FILE) == now, NEW_MESSAGE
