"""Collection of garbage in a serving daemon: what it consists of is left out, so that no turn waits for a walk over it."""

from pathlib import Path

from tests.rigs.daemon import Daemon, spawn, wait_connected, wait_until
from tests.rigs.payload import store, tokens_of

# A daemon that counts objects at a line on standard input: those a full collection leaves out, and those that it walks.
COUNTING_DAEMON = """
import asyncio, gc, sys
from kvpool.config.config import load_config
from kvpool.server.app import App

def count():
    if sys.stdin.readline():
        print(gc.get_freeze_count(), len(gc.get_objects()), int(gc.isenabled()), flush=True)
    else:
        sys.exit(0)

async def main():
    asyncio.get_running_loop().add_reader(sys.stdin, count)
    config = load_config(None, sys.argv[1:])
    await App(config, lambda: config).run()

gc.disable()
asyncio.run(main())
"""


def test_a_full_collection_walks_what_came_after_the_start_alone(tmp_path: Path) -> None:
    daemon = Daemon(tmp_path, **{"dram.capacity": "16MiB"})
    arguments = [one.removeprefix("--set=") for one in daemon.command() if one.startswith("--set=")]
    with spawn(COUNTING_DAEMON, *arguments) as process:
        wait_until(Path(daemon.socket).exists, "the daemon serves")
        with daemon.connect() as pool:
            wait_connected(pool)
            store(pool, pool.keys(tokens_of(1, 256 * 4)))
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write("count\n")
            process.stdin.flush()
            frozen, walked, is_enabled = map(int, process.stdout.readline().split())
        assert is_enabled == 1, "it rests for the start alone"
        assert frozen > 10_000, "modules, configuration, tables"
        assert walked < frozen // 4
        process.kill()
