"""Options of a run of tests: second runs and samples."""
