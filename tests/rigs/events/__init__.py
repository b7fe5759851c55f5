"""Tools of the tests of events."""
