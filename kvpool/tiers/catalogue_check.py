"""Read a whole catalogue in a process of its own, because a damaged LMDB file can kill who opens it.

    python -m kvpool.tiers.catalogue_check DIRECTORY ROWS_FD

Writes every row, its bytes good or bad, to the descriptor, and one line, `ok ROWS`, to standard output; exits 0 when
everything could be read. Anything else (another exit code, a signal, no line in time) means that the catalogue must not be
opened. Reads only, but for a file that ends before its last page: it gets the missing ones as zeros, which LMDB takes for
damage, where looking behind a file's end would kill the daemon.
"""

import os
import sys

import lmdb

from kvpool.tiers.catalogue_rows import ROW_BYTES

TABLES_MAX = 4


def main(path: str, rows_fd: int) -> int:
    """Walk every record; the exit code."""
    environment = lmdb.open(path, readonly=True, lock=False, max_dbs=TABLES_MAX, readahead=False)
    file_name, size = (
        os.path.join(path, "data.mdb"),
        (environment.info()["last_pgno"] + 1) * environment.stat()["psize"],
    )
    if os.path.getsize(file_name) < size <= environment.info()["map_size"]:
        os.truncate(file_name, size)
    with environment.begin() as transaction, open(rows_fd, "wb", closefd=False) as file:
        for name in (b"namespaces", b"meta"):
            with transaction.cursor(environment.open_db(name, transaction, create=False)) as cursor:
                for _ in cursor:
                    pass
        with transaction.cursor(environment.open_db(b"chunks", transaction, create=False)) as cursor:
            rows = list(cursor.iternext(keys=False, values=True))
        # What has another length is no row, and would put all behind it out of step.
        if set(map(len, rows)) - {ROW_BYTES}:
            rows = [row for row in rows if len(row) == ROW_BYTES]
        file.writelines(rows)
    sys.stdout.write(f"ok {len(rows)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2])))
