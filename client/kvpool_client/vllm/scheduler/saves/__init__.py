"""Saves as the scheduler plans them: what is worth storing, of whose blocks, and who holds these meanwhile."""
