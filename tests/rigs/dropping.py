"""Ends of leases over a raw connection, which is answered nothing: a later answer proves them."""

from kvpool.protocol import columns
from kvpool.protocol.blocking import BlockingConnection
from kvpool.protocol.records import messages as m
from kvpool.protocol.records import one_way


def drop_leases(connection: BlockingConnection, *leases: int) -> None:
    """End leases. They have ended when it returns: a connection's requests are served in order."""
    assert connection.notify(m.encode(one_way.DropLeases(columns.pack_numbers(leases)), 0))
    connection.call(m.Renew(b""), m.Done)
