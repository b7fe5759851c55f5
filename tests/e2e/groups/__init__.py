"""Layouts with groups over the real socket."""
