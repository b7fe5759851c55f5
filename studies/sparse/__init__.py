"""Quality of sparse recall: structured keys, a small trained model, ways to recall, and what they lose. No daemon is used."""
