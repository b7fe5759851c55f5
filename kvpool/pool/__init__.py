"""Pool: the verbs of a connection. Composes index, tiers, tiering, transfer and journal."""
