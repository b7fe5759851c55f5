"""Tests of the control plane between nodes."""
