"""Wire between the daemon and its store process, in frames (`transfer/child/frames.py`).

    daemon → process: [number, verb, names, offsets, sizes]
    process → daemon: [number, codes]

Verbs: EXIST (a code of 1: it is there), GET and PUT, whose objects are at these offsets of the shared memory, with these sizes.
A code is the size of what was got, 0 for what was put, or negative, as the library answers.
"""

EXIST, GET, PUT = range(3)
