"""The console scripts: they start a command, or name what is not installed of it.

An engine's environment has kvpool without the extra `daemon`, whose packages the commands need. Main thread only.

Exit code 2: the extra is not installed; else those of the command.
"""

import importlib
import sys

# The modules of the extra's packages.
EXTRA = frozenset({"click", "lmdb", "prometheus_client", "rich", "tomli", "uvloop", "zmq"})


def kvpoold() -> None:
    """The daemon's script."""
    _launch("kvpoold", "kvpool.cli.kvpoold")


def kvpoolctl() -> None:
    """The operator's script."""
    _launch("kvpoolctl", "kvpool_tools.cli.kvpoolctl")


def _launch(name: str, module: str) -> None:
    try:
        importlib.import_module(module).main()
    except ModuleNotFoundError as error:
        if error.name not in EXTRA:
            raise
        print(
            f"{name}: {error.name} is not installed: install kvpool's wheel with its extra daemon, kvpool-….whl[daemon]",
            file=sys.stderr,
        )
        sys.exit(2)
