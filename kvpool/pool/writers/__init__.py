"""What writers ask: reservations, commits, saves by copy."""
