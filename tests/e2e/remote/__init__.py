"""Two nodes, as a client sees them."""
