"""Tests of the study of sparse recall."""
