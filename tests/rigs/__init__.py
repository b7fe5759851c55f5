"""Tests of rigs."""
