"""Models of layouts with groups."""
