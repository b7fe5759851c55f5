"""Tests of a daemon with a device tier, on the emulated driver."""
