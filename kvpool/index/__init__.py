"""Index: what is stored, and for whom: namespaces, leases, tickets, reservations. Control thread only, no I/O."""
