"""What readers ask: leases and tickets on stored chunks."""
