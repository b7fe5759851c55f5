"""`bench peer`: chunks from node to node, by each transport."""
