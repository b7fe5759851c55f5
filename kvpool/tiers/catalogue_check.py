"""Read a whole catalogue in a process of its own, because a damaged LMDB file can kill who opens it.

    python -m kvpool.tiers.catalogue_check DIRECTORY ROWS_FD

Writes every row, good or bad, to the descriptor, and one line, `ok ROWS`, to standard output; exits 0 when everything could be
read. Anything else (another exit code, a signal, no line in time) means that the catalogue must not be opened. Reads only.
"""

import sys

import lmdb

from kvpool.tiers import catalogue_rows
from kvpool.types import KEY_BYTES

TABLES_MAX = 4
ROWS_BYTES_MAX = 1 << 36


def main(path: str, rows_fd: int) -> int:
    """Walk every record; the exit code."""
    environment = lmdb.open(path, readonly=True, lock=False, max_dbs=TABLES_MAX, readahead=False)
    with environment.begin() as transaction, open(rows_fd, "wb", closefd=False) as file:
        for name in (b"namespaces", b"meta"):
            with transaction.cursor(environment.open_db(name, transaction, create=False)) as cursor:
                for _ in cursor:
                    pass
        with transaction.cursor(environment.open_db(b"chunks", transaction, create=False)) as cursor:
            keys = list(cursor.iternext(keys=True, values=False))
            values = list(cursor.iternext(keys=False, values=True))
        is_row = [
            len(key) == KEY_BYTES and len(value) == catalogue_rows.VALUE_BYTES
            for key, value in zip(keys, values, strict=True)
        ]
        if not all(is_row):
            keys = [key for key, is_good in zip(keys, is_row, strict=True) if is_good]
            values = [value for value, is_good in zip(values, is_row, strict=True) if is_good]
        file.write(catalogue_rows.join(b"".join(keys), b"".join(values)))
    sys.stdout.write(f"ok {len(is_row)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2])))
