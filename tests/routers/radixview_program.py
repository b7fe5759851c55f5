"""RadixView's reader as a program: follows an endpoint, and writes its blocks for each line that it reads.

Run by the Python of an environment that has it: `python radixview_program.py ENDPOINT`. A line of JSON for each: a list of
[hash, parent, token ids].
"""

import json
import sys
import threading

from radixview.discover import PublisherSet, RankPublisher
from radixview.subscribe import listen
from radixview.tree import CacheTree


class Ids:
    """In the place of its text: token ids as JSON."""

    def decode(self, tokens: list[int]) -> str:
        """The ids."""
        return json.dumps(tokens)


def main(endpoint: str) -> None:
    """Follow until there is no more to read."""
    tree, stop = CacheTree(), threading.Event()
    publishers = PublisherSet(block_size=0, ranks=(RankPublisher(0, endpoint, "kv@"),))
    follower = threading.Thread(target=listen, args=(publishers, stop, Ids(), tree), daemon=True)
    follower.start()
    for _ in sys.stdin:
        blocks = [block for run in tree.view().runs.values() for block in run]
        print(json.dumps([[block.hash, block.parent, json.loads(block.text)] for block in blocks]), flush=True)
    stop.set()
    follower.join()


if __name__ == "__main__":
    main(sys.argv[1])
