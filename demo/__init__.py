"""`python -m demo`: a torch engine answers conversations through kvpool, across processes, and shows what that saves.

Not part of the distribution. `conversation` makes the prompts, `paged_kv` and `engine` are a small but real engine,
`worker` is one engine process, `node` runs the daemon and the workers, `report` prints.
"""
