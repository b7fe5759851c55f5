"""The pool's side of a store that nodes share: what is published there, and what engines ask it for."""
