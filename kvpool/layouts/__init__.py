"""Parts of layouts: groups of layers, shares of ranks, summaries of blocks."""
