"""SSD tier: segment files, their catalogue, their recovery."""
