"""Commands about chunks: why, retain, check and verify."""
