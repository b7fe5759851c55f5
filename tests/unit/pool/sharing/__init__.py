"""The pool's side of a store that nodes share."""
