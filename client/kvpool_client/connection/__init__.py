"""Connection to the daemon: link, session, counters."""
