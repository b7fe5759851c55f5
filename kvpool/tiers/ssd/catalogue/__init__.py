"""Catalogue of the SSD tier: which slot has which chunk, in LMDB."""
