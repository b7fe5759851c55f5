"""A symbolic link as the SSD tier's directory: as good as its target, which messages name."""

import os
from pathlib import Path

import pytest

from kvpool.tiers.ssd.directory import SsdUnavailable, check_directory

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    """A directory for a tier."""
    path = tmp_path / "disk"
    path.mkdir(mode=0o700)
    return path


@pytest.fixture
def link(tmp_path: Path, disk: Path) -> Path:
    """A link to it."""
    path = tmp_path / "link"
    path.symlink_to(disk)
    return path


def _refusal(path: Path, *, is_made: bool = False) -> str:
    with pytest.raises(SsdUnavailable) as refused:
        check_directory(path, is_made=is_made)
    return str(refused.value)


def test_a_link_to_a_valid_directory_is_accepted(link: Path, disk: Path) -> None:
    assert check_directory(link, is_made=True) == check_directory(disk, is_made=False)


def test_the_rights_of_the_links_target_count(link: Path, disk: Path) -> None:
    disk.chmod(0o750)
    assert _refusal(link).startswith(f"it is a symbolic link to {disk}: it has rights 0750")
    assert _refusal(link).endswith(f"chmod 700 {disk}")


@as_root
def test_the_owner_of_the_links_target_counts(link: Path, disk: Path) -> None:
    os.chown(disk, 65534, 65534)
    assert _refusal(link).startswith(
        f"it is a symbolic link to {disk}: it belongs to uid 65534, and the daemon is uid 0: run it as that user"
    )


@as_root
def test_a_link_that_a_stranger_has_made_is_refused(link: Path) -> None:
    os.chown(link, 65534, 65534, follow_symlinks=False)
    assert "a symbolic link that uid 65534 has made, expected root" in _refusal(link)


def test_the_target_of_a_link_is_never_created(link: Path, disk: Path) -> None:
    disk.rmdir()
    refusal = _refusal(link, is_made=True)
    assert f"a symbolic link to {disk}, which is not there: mount its disk" in refusal
    assert refusal.endswith(f"(install -d -m 700 -o {os.geteuid()} {disk})")
    assert not disk.exists()


def test_commands_that_a_refusal_names_take_the_path_as_one_word(tmp_path: Path) -> None:
    path = tmp_path / "a disk"
    assert f"install -d -m 700 -o {os.geteuid()} '{path}'" in _refusal(path)
    path.mkdir(mode=0o755)
    assert _refusal(path).endswith(f"chmod 700 '{path}'")


def test_a_link_to_a_file_or_to_itself_is_no_directory(tmp_path: Path, link: Path, disk: Path) -> None:
    disk.rmdir()
    disk.write_text("")
    assert "this is no directory" in _refusal(link)
    disk.unlink()
    disk.symlink_to(link)
    assert "leads back to itself" in _refusal(link)


def test_a_link_to_a_directory_of_the_system_is_refused(tmp_path: Path) -> None:
    (tmp_path / "to-tmp").symlink_to("/tmp")
    assert "this directory is the system's" in _refusal(tmp_path / "to-tmp")
