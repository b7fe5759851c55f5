"""Bytes compared with their checksums, and books recounted."""
