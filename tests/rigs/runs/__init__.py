"""How a run of tests goes: second runs and samples."""
