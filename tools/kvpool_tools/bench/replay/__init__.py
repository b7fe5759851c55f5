"""`bench replay`: a trace replayed through a live daemon."""
