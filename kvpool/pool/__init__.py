"""The pool: the verbs that a connection may ask. Composes everything below."""
