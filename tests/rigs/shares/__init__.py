"""Ranks of engines that have a part of every chunk."""
