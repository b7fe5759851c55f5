"""Tests of trtllm."""
