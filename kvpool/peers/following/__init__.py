"""Following: which chunks other nodes have, in the table of remote chunks."""
