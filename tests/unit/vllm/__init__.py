"""Tests of vllm."""
