"""Models of chunks that ranks share."""
