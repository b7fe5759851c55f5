"""Tests of disaggregation."""
