"""Reload of the configuration while the daemon serves: options that can change do, others are named, a fault changes nothing.

    requested (SIGHUP, an operator) ──► read and checked ──fault──► nothing changes, every fault is logged
                                            └──► options in LIVE take effect ──► each change is logged
                                                 all others: "needs a restart", and so at each further reading

The file and the overrides are those of the start. Control thread only; the files are read in an executor. Readings follow one
another, and SIGHUPs that arrive while one waits are one.

Invariant: `config` is what is in effect.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from kvpool.config.config import Config
from kvpool.config.settings import ORDER, Setting
from kvpool.errors import ConfigError
from kvpool.units import format_duration

log = logging.getLogger(__name__)
log.setLevel(logging.INFO)  # at every log.level: an operator has requested it

Keys = frozenset[bytes]


@dataclass(frozen=True, slots=True)
class LiveOption:
    """An option that can change while the daemon serves: how its value is shown, and where the new one applies."""

    show: Callable[[Any], str] = str
    counts_for: str = ""


LIVE = {
    "log.level": LiveOption(),
    "server.lease_ttl": LiveOption(
        format_duration,
        "leases from their next use on; connected engines retain at least the time that they were given",
    ),
    "server.reservation_ttl": LiveOption(format_duration, "saves that begin from now on"),
    "server.handshake_timeout": LiveOption(format_duration, "connections from now on"),
    "server.stop_timeout": LiveOption(format_duration),
    "server.stop": LiveOption(),
    "dram.announced_ttl": LiveOption(format_duration, "announcements from now on"),
    "ssd.admission": LiveOption(),
    "ssd.write_budget": LiveOption(),
    "ssd.stop_timeout": LiveOption(format_duration),
}


@dataclass(frozen=True, slots=True)
class KeyFile:
    """CURVE keys in the file that an option names, which are read again whether or not the option has changed.

    `read` reads them (None: keys are not required); `let_in` admits these and no others from now on, and describes the change,
    empty for none.
    """

    option: str
    read: Callable[[Config], Keys | None]
    let_in: Callable[[Keys], str]


@dataclass(frozen=True, slots=True)
class ReloadResult:
    """Result of one reload: `changed`, a line for each option; `restart`, the options that wait for a restart."""

    changed: tuple[str, ...]
    restart: tuple[str, ...]

    def to_report(self) -> dict[str, Any]:
        """For operators."""
        return {"changed": list(self.changed), "needs_restart": list(self.restart)}


class Reload:
    """See the module. `read` reads files and overrides, and `key_files` the keys of those that may connect. `apply` puts a
    configuration into effect; `on_turn` is called when a reload begins (True) and ends.
    """

    def __init__(
        self,
        config: Config,
        *,
        read: Callable[[], Config],
        key_files: Sequence[KeyFile],
        apply: Callable[[Config], None],
        on_turn: Callable[[bool], None],
    ) -> None:
        self.config = config
        self._read = read
        self._key_files = tuple(key_files)
        self._apply = apply
        self._on_turn = on_turn
        self._turn = asyncio.Lock()
        self._asked: asyncio.Task[None] | None = None
        self._is_waiting = False

    def ask_reload(self) -> None:
        """Reload soon, and log the result."""
        if not self._is_waiting:
            self._is_waiting = True
            self._asked = asyncio.get_running_loop().create_task(self._run_logged())

    def cancel(self) -> None:
        """Read no more."""
        if self._asked is not None:
            self._asked.cancel()

    async def run(self) -> ReloadResult:
        """Read again now, and log what was changed. Raises ConfigError with every fault; then nothing is changed."""
        async with self._turn:
            self._is_waiting = False
            self._on_turn(True)
            try:
                config, keys = await asyncio.get_running_loop().run_in_executor(None, self._read_all)
            except ConfigError as error:
                log.error("the configuration is not reloaded, nothing is changed: %s", "; ".join(error.faults))
                raise
            else:
                return self._change_to(config, keys)
            finally:
                self._on_turn(False)

    def change(self, name: str, value: object) -> None:
        """Have one option of LIVE take effect, until the configuration is read again."""
        assert name in LIVE
        self.config = _with_option(self.config, name, value, Setting(value, ORDER))
        self._apply(self.config)

    async def _run_logged(self) -> None:
        try:
            await self.run()
        except ConfigError:
            return  # logged, without an answer to anybody
        except (OSError, ValueError, MemoryError) as error:
            log.error("the configuration is not reloaded, nothing is changed: %s: %s", type(error).__name__, error)

    def _read_all(self) -> tuple[Config, list[Keys | None]]:
        config = self._read()
        return config, [file.read(config) for file in self._key_files]

    def _change_to(self, config: Config, keys: list[Keys | None]) -> ReloadResult:
        different = _differences(self.config, config)
        changed: list[str] = []
        for name in [name for name in different if name in LIVE]:
            before, after = different[name]
            option = LIVE[name]
            counts_for = f" (for {option.counts_for})" if option.counts_for else ""
            changed.append(f"{name}: {option.show(before)} -> {option.show(after)}{counts_for}")
            self.config = _with_option(self.config, name, after, config.settings[name])
        self._apply(self.config)
        for file, listed in zip(self._key_files, keys, strict=True):
            if listed is None:
                continue
            change = file.let_in(listed)
            if change:
                changed.append(f"{file.option}: {change}")
            section, _, name = file.option.partition(".")
            self.config = _with_option(
                self.config, file.option, getattr(getattr(config, section), name), config.settings[file.option]
            )
            different.pop(file.option, None)
        restart = tuple(name for name in different if name not in LIVE)
        for line in changed:
            log.info("reloaded %s", line)
        for name in restart:
            log.warning("%s has changed, which needs a restart", name)
        if not changed and not restart:
            log.info("reloaded: no option has changed")
        return ReloadResult(tuple(changed), restart)


def _with_option(config: Config, name: str, value: object, setting: Setting) -> Config:
    section, key = name.split(".")
    settings = {**config.settings, name: setting}
    return replace(config, settings=settings, **{section: replace(getattr(config, section), **{key: value})})


def _differences(before: Config, after: Config) -> dict[str, tuple[Any, Any]]:
    """The options that differ, with both values."""
    found = {}
    for section in (field for field in fields(before) if field.compare):
        old, new = getattr(before, section.name), getattr(after, section.name)
        for option in fields(old):
            values = getattr(old, option.name), getattr(new, option.name)
            if values[0] != values[1]:
                found[f"{section.name}.{option.name}"] = values
    return found
