"""The tier for vLLM's tiered offloading: over a real daemon, and under vLLM's own scheduler and manager."""
