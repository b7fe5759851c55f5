"""Check of a whole catalogue in a process of its own, because a damaged LMDB file can kill the process that opens it.

    python -I check.py DIRECTORY ROWS_FD ROW_BYTES

Writes every row, good or bad, to the descriptor, and then the line `ok ROWS` to standard output. Exits 0 when everything could
be read; with the line `unreadable ERRNO` where the disk does not give the file: LMDB reads through a map, where that would be
a signal. Anything else (another exit code, a signal, no line in time) means that the catalogue must not be opened. It changes
one thing: a file that ends before its last page gets the missing pages as zeros. LMDB reports these as damage; reading behind
the end of the file would kill the daemon.

Imports the standard library and lmdb only, and nothing that depends on where or by whom it is started.
"""

import os
import sys

import lmdb

TABLES_MAX = 4
UNREADABLE = "unreadable"
# The first two pages, which say how many are in use. A page of LMDB has 64 KiB at most.
METAS_BYTES = 2 * (64 << 10)
BUFFER_BYTES = 1 << 20


def main(path: str, rows_fd: int, row_bytes: int) -> int:
    """Walk every record; the exit code."""
    try:
        return walk(path, rows_fd, row_bytes)
    except OSError as error:
        sys.stdout.write(f"{UNREADABLE} {error.errno}\n")
        return 1


def walk(path: str, rows_fd: int, row_bytes: int) -> int:
    """The exit code. Raises OSError where the disk does not give the file."""
    read_bytes(os.path.join(path, "data.mdb"), METAS_BYTES)
    environment = lmdb.open(path, readonly=True, lock=False, max_dbs=TABLES_MAX, readahead=False)
    file_name, size = (
        os.path.join(path, "data.mdb"),
        (environment.info()["last_pgno"] + 1) * environment.stat()["psize"],
    )
    if os.path.getsize(file_name) < size <= environment.info()["map_size"]:
        os.truncate(file_name, size)
    read_bytes(file_name, size)
    rows = 0
    with environment.begin(buffers=True) as transaction, open(rows_fd, "wb", BUFFER_BYTES, closefd=False) as file:
        for name in (b"namespaces", b"meta"):
            with transaction.cursor(environment.open_db(name, transaction, create=False)) as cursor:
                for _ in cursor:
                    pass
        write = file.write
        with transaction.cursor(environment.open_db(b"chunks", transaction, create=False)) as cursor:
            for row in cursor.iternext(keys=False, values=True):
                # A value of another length is no row, and would shift all rows after it.
                if len(row) == row_bytes:
                    write(row)
                    rows += 1
    sys.stdout.write(f"ok {rows}\n")
    return 0


def read_bytes(file_name: str, size: int) -> None:
    """Read the beginning of a file, to have it in memory. Raises OSError."""
    buffer = bytearray(BUFFER_BYTES)
    with open(file_name, "rb", buffering=0) as file:
        left = size
        while left > 0 and (count := file.readinto(buffer)):
            left -= count


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
