"""Daemons of tests of compute by lookup."""

from tests.rigs.module_daemons import module_daemon, module_daemons

__all__ = ["module_daemon", "module_daemons"]  # fixtures
