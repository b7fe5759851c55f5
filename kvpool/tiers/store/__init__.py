"""Store tier: chunks of a Mooncake Store that many nodes share, moved by a process of its own."""
