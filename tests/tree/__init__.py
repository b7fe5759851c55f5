"""The rules of the tree: `make check` runs them."""
