"""Engines beside a daemon that dies again and again, and what of their work a former life must have left."""
