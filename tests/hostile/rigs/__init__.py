"""Tools that these tests share."""
