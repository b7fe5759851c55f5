"""Opening of an SSD tier: locks its directory, finds the chunks of earlier processes, makes files and catalogue usable.

Unusable files are removed or set aside first. A partial opening is closed again: the result is an `Opened` tier or an error.
Blocks: for an executor, not for the control thread.
"""

import logging
import shutil
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import lmdb
import numpy as np
import numpy.typing as npt

from kvpool import failpoint
from kvpool.errors import KVPoolError
from kvpool.memory_limit import describe
from kvpool.tiers.base import ArenaMemory
from kvpool.tiers.ssd import flushed as ssd_flushed
from kvpool.tiers.ssd.catalogue import opening as catalogue_open
from kvpool.tiers.ssd.catalogue import room as catalogue_room
from kvpool.tiers.ssd.catalogue import rows as catalogue_rows
from kvpool.tiers.ssd.catalogue.catalogue import Catalogue
from kvpool.tiers.ssd.catalogue.identity import FILE_NAME as IDENTITY_NAME
from kvpool.tiers.ssd.catalogue.identity import Identity, NamespaceRecord, new_epoch, read_identity, remove
from kvpool.tiers.ssd.directory import SsdUnavailable, check_directory
from kvpool.tiers.ssd.flushed import FlushFloors
from kvpool.tiers.ssd.opened import CLOSE_TIMEOUT_S, OpenSsd
from kvpool.tiers.ssd.place import SsdPlace
from kvpool.tiers.ssd.plan import CATALOGUE_NAME, SsdPlan
from kvpool.tiers.ssd.rebuild import are_flushed, find_chunks
from kvpool.tiers.ssd.segments import (
    check_room,
    has_segments,
    have_other_sizes,
    locked,
    open_segments,
    remove_misfits,
    remove_segments,
)

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Opened:
    """An opened tier: its files, its catalogue and flush floors, and the chunks of earlier processes: rows in the order of
    restoring, and the namespaces by the numbers in the rows.

    `epoch`: of the segment files. `generation`: the greatest one in use. `disk_warning`: for operators.
    """

    disk: OpenSsd
    catalogue: Catalogue
    floors: FlushFloors
    rows: npt.NDArray[np.void]
    namespaces: dict[int, NamespaceRecord]
    bad_rows: int
    generation: int
    epoch: bytes
    disk_warning: str


def open_ssd(plan: SsdPlan, memory: ArenaMemory, is_stopping: threading.Event) -> Opened:
    """Open or make everything, and find earlier chunks. Raises SsdUnavailable, also soon after `is_stopping` is set."""
    try:
        warning = check_directory(plan.path, is_made=plan.config.create)
        return _open(plan, memory, is_stopping, warning)
    except (OSError, RuntimeError, ValueError, MemoryError, KVPoolError, lmdb.Error) as error:
        traceback.clear_frames(error.__traceback__)  # which hold the lock of the directory
        raise SsdUnavailable(f"{plan.path}: {describe(error)}") from error


def _open(plan: SsdPlan, memory: ArenaMemory, is_stopping: threading.Event, warning: str) -> Opened:
    catalogue_path = plan.path / CATALOGUE_NAME
    with locked(plan.path):
        check_room(plan)
        found, identity, is_unreadable = _look(plan, catalogue_path, is_stopping)
    files = open_segments(plan)
    place = SsdPlace(plan)
    rows, bad = catalogue_rows.restorable(found.rows if found and not plan.config.rebuild else b"")
    is_rebuilt = is_unreadable or (identity.namespaces != {} and (found is None or plan.config.rebuild))
    if is_rebuilt:
        rows = _rebuild(plan, identity, catalogue_path, is_stopping)
    is_outgrown = found is not None and not is_rebuilt and not catalogue_room.fits(catalogue_path, plan.catalogue_bytes)
    if is_outgrown:
        rows = rows[rows["offset"] < plan.segments * plan.segment_bytes][: plan.max_chunks]
        log.info("the catalogue is made anew for %d chunks: it was of a larger ssd.capacity", len(rows))
        remove(catalogue_path)
    floors = FlushFloors(plan.path, found.flushes if found else 0)
    flushed = are_flushed(rows, identity, floors.floors if floors.is_ahead and not is_rebuilt else {})
    last = found.generations_end if found else ssd_flushed.highest_floor(plan.path)
    generation = max(last, int(rows["generation"].max()) if len(rows) else 0)
    failpoint.reach("daemon.ssd.open_catalogue")

    def sync_data() -> None:
        place.check()
        files.sync()
        floors.write()

    catalogue = _open_catalogue(plan, catalogue_path, identity, last_generation=generation, sync_data=sync_data)
    try:
        if is_rebuilt or is_outgrown:
            catalogue.fill(rows)
        for key in rows["key"][flushed]:
            catalogue.delete(bytes(key))
        catalogue.put_flushes(floors.sequence)
        catalogue.start(checkpoint_s=plan.config.checkpoint_interval)
        disk = OpenSsd(plan, memory, files=files, place=place, epoch=identity.epoch)
    except BaseException:
        catalogue.close(CLOSE_TIMEOUT_S)
        raise
    return Opened(
        disk=disk,
        catalogue=catalogue,
        floors=floors,
        rows=rows[~flushed],
        namespaces=identity.namespaces,
        bad_rows=bad,
        generation=generation,
        epoch=identity.epoch,
        disk_warning=warning,
    )


def _open_catalogue(
    plan: SsdPlan, path: Path, identity: Identity, *, last_generation: int, sync_data: Callable[[], None]
) -> Catalogue:
    """The catalogue, made where there is none. One that is damaged is set aside: the next attempt finds none."""
    try:
        return Catalogue(
            path,
            plan.catalogue_bytes,
            identity,
            sync_data=sync_data,
            generations_end=last_generation + catalogue_open.GENERATIONS_OF_A_LIFE,
        )
    except catalogue_open.DAMAGE as error:
        log.error("catalogue %s is set aside, its rows are looked for in the slots: %s", path, error)
        catalogue_open.set_aside(path, plan.catalogue_bytes)
        raise


def _look(
    plan: SsdPlan, catalogue_path: Path, is_stopping: threading.Event
) -> tuple[catalogue_open.Found | None, Identity, bool]:
    """Find the chunks of earlier processes, after everything unusable was removed. The third: whether there is a catalogue that
    the disk does not give. Raises OSError and Unreadable: what cannot be read at this moment is not what is unusable."""
    failpoint.reach("daemon.ssd.look")
    if have_other_sizes(plan):
        log.warning("the ssd tier begins empty: its files are of another ssd.segment or ssd.capacity")
        _forget_everything(plan.path)
    catalogue_open.bound_aside(catalogue_path, plan.catalogue_bytes)
    found, unreadable = None, None
    try:
        found = catalogue_open.examine(catalogue_path, plan.catalogue_bytes, is_stopping.is_set).found
    except catalogue_open.Unreadable as error:
        log.error("%s: its rows are looked for in the slots", error)
        unreadable = error
    identity = Identity(found.epoch, found.namespaces) if found else read_identity(plan.path)
    if identity is None:
        if unreadable is not None:
            raise unreadable
        if has_segments(plan.path):
            log.warning("the ssd tier begins empty: it has neither a catalogue nor an identity that can be used")
        _forget_everything(plan.path)
        identity = Identity(new_epoch(), {})
    failpoint.reach("daemon.ssd.open_files")
    remove_misfits(plan)
    return found, identity, unreadable is not None


def _rebuild(
    plan: SsdPlan, identity: Identity, catalogue_path: Path, is_stopping: threading.Event
) -> npt.NDArray[np.void]:
    """Find chunks by the headers of their slots, because the catalogue is lost or must not be used. It stays where they cannot
    be read either: the disk may give both later."""
    found = find_chunks(plan, identity, is_stopping)
    if catalogue_path.exists():
        catalogue_open.set_aside(catalogue_path, plan.catalogue_bytes)
    return catalogue_rows.restorable(found)[0]


def _forget_everything(path: Path) -> None:
    shutil.rmtree(path / CATALOGUE_NAME, ignore_errors=True)
    for name in (IDENTITY_NAME, ssd_flushed.FILE_NAME):
        (path / name).unlink(missing_ok=True)
    remove_segments(path)
