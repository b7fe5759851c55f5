"""Tag of a host: one for each boot, and none without a boot id."""

from pathlib import Path

from kvpool.transfer.near.host import host_tag


def test_a_boot_has_one_tag_and_another_one_has_another(tmp_path: Path) -> None:
    (tmp_path / "one").write_text("one boot\n")
    (tmp_path / "other").write_text("another boot\n")
    tags = [host_tag(str(tmp_path / name)) for name in ("one", "one", "other")]
    assert tags[0] == tags[1] != tags[2]
    assert all(tag is not None and len(tag) == 16 for tag in tags)
    assert b"boot" not in (tags[0] or b"")


def test_a_kernel_that_gives_no_boot_id_has_none(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("\n")
    assert host_tag(str(tmp_path / "absent")) is None
    assert host_tag(str(tmp_path / "empty")) is None
