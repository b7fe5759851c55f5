"""The test suite: unit mirrors the packages, model compares with plain dicts, e2e runs the real daemon."""
