"""Other nodes: who they are, whether they answer, and the control connections to them."""
