"""The connection to the daemon: link, session, what it counts."""
