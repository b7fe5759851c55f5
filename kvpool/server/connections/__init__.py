"""Connections of engines and operators: accepting, turns, requests, bounds."""
