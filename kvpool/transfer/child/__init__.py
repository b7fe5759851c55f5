"""Child processes that have a library which may abort, and memory that they share with the daemon."""
