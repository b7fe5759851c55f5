"""Simulator: a daemon's decisions on a trace's requests, without bytes, processes or waiting."""
