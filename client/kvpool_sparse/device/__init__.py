"""Compute by lookup on a device: a bounded part of a long sequence's KV beside the engine. Imports torch."""

from kvpool_sparse.device.sequence import DeviceSequence

__all__ = ["DeviceSequence"]
