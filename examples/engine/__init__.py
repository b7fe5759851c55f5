"""A small, whole inference engine over kvpool's block pool: `python -m examples.engine.benchmark` measures it.

`model` and `attention` compute, `sampling` chooses tokens, `engine` puts requests onto the block pool, `schedulers` decides who
runs when; `workload`, `cells`, `benchmark` and `report` measure. docs/torch.md explains it.
"""
