"""Look at a catalogue in a process of its own, because a damaged LMDB file can kill who opens it.

    python -m kvpool.tiers.catalogue_check DIRECTORY

Prints one line, `ok ROWS BAD`, and exits 0 when every record could be read. Anything else (another exit code, a signal, no
line in time) means that the catalogue must not be opened. Reads only, but for a file that ends before its last page: it
gets the missing ones as zeros, which LMDB takes for damage, where looking behind a file's end would kill the daemon.
"""

import os
import sys

import lmdb

from kvpool.tiers.catalogue_rows import parse

TABLES_MAX = 4


def main(path: str) -> int:
    """Walk every record; the exit code."""
    environment = lmdb.open(path, readonly=True, lock=False, max_dbs=TABLES_MAX, readahead=False)
    file, size = os.path.join(path, "data.mdb"), (environment.info()["last_pgno"] + 1) * environment.stat()["psize"]
    if os.path.getsize(file) < size <= environment.info()["map_size"]:
        os.truncate(file, size)
    with environment.begin() as transaction:
        table = environment.open_db(b"chunks", transaction, create=False)
        with transaction.cursor(table) as cursor:
            keys = b"".join(cursor.iternext(keys=True, values=False))
            values = b"".join(cursor.iternext(keys=False, values=True))
        rows, bad = parse(keys, values)
        for name in (b"namespaces", b"meta"):
            with transaction.cursor(environment.open_db(name, transaction, create=False)) as cursor:
                for _ in cursor:
                    pass
    sys.stdout.write(f"ok {len(rows)} {bad}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
