"""The adapters of engines, each driven as its engine drives it, over a real daemon."""
