"""`bench replay`: a trace through a live daemon."""
