"""Ends of leases and reservations over a raw connection. They are not answered: a later answer proves them."""

from kvpool.protocol import columns
from kvpool.protocol.blocking import BlockingConnection
from kvpool.protocol.records import messages as m
from kvpool.protocol.records import one_way


def drop_leases(connection: BlockingConnection, *leases: int) -> None:
    """End leases. They have ended when it returns: a connection's requests are served in order."""
    _drop(connection, one_way.DropLeases(columns.pack_numbers(leases)))


def drop_reservations(connection: BlockingConnection, *reservations: int) -> None:
    """End reservations, as `drop_leases`."""
    _drop(connection, one_way.DropReservations(columns.pack_numbers(reservations)))


def _drop(connection: BlockingConnection, record: object) -> None:
    assert connection.notify(m.encode(record, 0))
    connection.call(m.Renew(b""), m.Done)
