"""Rigs for the block pool: an engine whose KV derives from each token's prefix."""
