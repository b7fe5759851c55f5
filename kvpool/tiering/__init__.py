"""Moves between neighbouring tiers: promotions, demotions, admission, restore."""
