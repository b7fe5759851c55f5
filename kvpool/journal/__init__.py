"""History of chunks: the event log, and the reasons why chunks are gone."""
