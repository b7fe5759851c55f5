"""`bench turns`: work that could hold up the control thread."""
