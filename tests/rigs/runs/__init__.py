"""Options of a run of tests: samples, a limit on the time, verdicts."""
