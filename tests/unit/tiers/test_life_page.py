"""Life page: what clients of one life learn of the next one, and what they cannot do about it."""

import errno
import fcntl
import mmap
import os

import pytest

import kvpool_native
from kvpool.ids import PAGE_BYTES
from kvpool.tiers.dram.kept.life_page import LifePage


def test_every_life_of_a_page_sees_the_last_number_and_so_do_clients() -> None:
    first = LifePage.create()
    assert first.number == 0
    client = kvpool_native.LifePage(kvpool_native.Mapping.attach(first.client_fd, PAGE_BYTES, writable=False))
    first.begin_life(1)
    second = LifePage.attach(first.fd)
    assert second.number == client.life == 1
    second.begin_life(7)
    assert first.number == client.life == 7
    first.close()
    first.close()
    second.close()
    assert client.life == 7


def test_a_life_puts_its_number_over_whatever_somebody_has_written() -> None:
    page = LifePage.create()
    for scribbled in (0, 7, (1 << 64) - 1):
        os.pwrite(page.fd, scribbled.to_bytes(8, "little"), 0)
        page.begin_life(7)
        assert page.number == 7
    page.close()


def test_a_client_can_neither_write_nor_resize_nor_seal_it() -> None:
    page = LifePage.create()
    fd = page.client_fd
    with pytest.raises(PermissionError):
        mmap.mmap(fd, PAGE_BYTES, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    for change in (
        lambda: os.pwrite(fd, b"\xff", 0),
        lambda: os.ftruncate(fd, 0),
        lambda: fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE),
    ):
        with pytest.raises(OSError) as refused:  # noqa: PT011 - its number is looked at
            change()
        assert refused.value.errno in (errno.EBADF, errno.EINVAL, errno.EPERM)
    with pytest.raises(PermissionError):
        kvpool_native.Mapping.attach(fd, PAGE_BYTES, writable=True)
    client = kvpool_native.LifePage(kvpool_native.Mapping.attach(fd, PAGE_BYTES, writable=False))
    with pytest.raises(ValueError, match="read-only"):
        client.begin(9)
    assert page.number == 0
    page.close()


def test_a_region_without_room_is_no_page() -> None:
    page = LifePage.create()
    with pytest.raises(ValueError, match="no room"):
        kvpool_native.LifePage(kvpool_native.Mapping.attach(page.fd, 4, writable=True))
    page.close()
