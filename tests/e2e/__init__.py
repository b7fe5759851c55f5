"""The real daemon on a temporary socket: stopped, killed, restarted."""
