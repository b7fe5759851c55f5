"""What happened to which chunk: the event log and the history of chunks."""
