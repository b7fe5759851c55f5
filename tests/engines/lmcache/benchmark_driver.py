"""`lmcache bench l2` with LMCache out of a wheel: the arguments are its own."""

import sys

from tests.engines.lmcache import stubs


def main() -> None:
    stubs.install()
    from lmcache.cli.main import main as run

    sys.argv = ["lmcache", "bench", "l2", *sys.argv[1:]]
    run()


if __name__ == "__main__":
    main()
