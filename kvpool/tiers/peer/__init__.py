"""Peer tier: chunks that other nodes have, pulled over the network."""
