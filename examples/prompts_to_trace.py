"""Turns a log of prompts into a trace for `kvpoolctl simulate` (docs/sizing.md).

Reads one request a line on stdin, `{"at_s": 12.5, "tokens": [1, 2, …], "output_tokens": 80}`, and writes Mooncake's form on
stdout. A block's id stands for all tokens up to its end, so prompts share ids as far as they begin alike, and no more. Ids
are numbers in the order of their first use: nothing of a prompt can be read from the trace.
"""

import hashlib
import json
import sys

BLOCK_TOKENS = 512


def main() -> None:
    """Read, number, write; holds one digest for each block seen."""
    numbers: dict[bytes, int] = {}
    for line in sys.stdin:
        request = json.loads(line)
        tokens, prefix, ids = request["tokens"], b"", []
        for start in range(0, len(tokens) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
            block = b"".join(token.to_bytes(4, "little") for token in tokens[start : start + BLOCK_TOKENS])
            prefix = hashlib.sha256(prefix + block).digest()
            ids.append(numbers.setdefault(prefix, len(numbers)))
        fields = {"timestamp": round(1000 * request["at_s"]), "input_length": len(tokens)}
        print(json.dumps({**fields, "output_length": request["output_tokens"], "hash_ids": ids}))


if __name__ == "__main__":
    main()
