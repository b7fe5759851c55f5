"""Tests of the secondary tier of vLLM's tiered offloading."""
