"""The digest of weights: of every byte, as the files were when the reading was made, and of nothing else."""

import hashlib
import logging
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvpool.errors import LayoutMismatch
from kvpool_client.engines.digest_memory import DigestMemory
from kvpool_client.engines.weights_reading import READ_BYTES, TICK_NS, WeightsReader, WeightsReading, digest_of
from tests.rigs.daemon import wait_until

SIZE = 3000
LOG = logging.getLogger(__name__)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A directory with two files of weights, an index, code, and files that change no KV."""
    place = tmp_path / "model"
    place.mkdir()
    for name in ("a.safetensors", "b.bin", "a.safetensors.index.json", "modeling.py", "README.md", "tokenizer.json"):
        (place / name).write_bytes(name.encode().ljust(SIZE, b"."))
    return place


def digest(place: Path, *further: str, memory: DigestMemory | None = None) -> str:
    reading = WeightsReading(place, further)
    reading.read(memory or DigestMemory(None), threading.Event())
    found = reading.find()
    assert found
    return found


def overwrite(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(b"!")


@pytest.mark.parametrize("offset", [0, 1, SIZE // 2, SIZE - 1])
@pytest.mark.parametrize("name", ["a.safetensors", "b.bin"])
def test_every_byte_counts(model: Path, name: str, offset: int) -> None:
    before = digest(model)
    assert digest(model) == before
    overwrite(model / name, offset)
    assert digest(model) != before


def test_bytes_behind_the_first_read_count(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(bytes(READ_BYTES + 10))
    before = digest(path)
    assert before == digest_of({"model.gguf": hashlib.sha256(bytes(READ_BYTES + 10)).hexdigest()})
    overwrite(path, READ_BYTES + 9)
    assert digest(path) != before


@pytest.mark.parametrize("name", ["a.safetensors.index.json", "modeling.py", "hf_quant_config.json", "config.json"])
def test_what_decides_how_weights_are_used_counts(model: Path, name: str) -> None:
    before = digest(model, "config.json")
    (model / name).write_bytes(b"{}")
    assert digest(model, "config.json") != before


@pytest.mark.parametrize("name", ["README.md", "tokenizer.json", "config.json"])
def test_what_changes_no_weights_does_not_count(model: Path, name: str) -> None:
    before = digest(model)
    (model / name).write_bytes(b"other")
    assert digest(model) == before


def test_the_digest_follows_bytes_and_names_and_not_the_place(model: Path, tmp_path: Path) -> None:
    before = digest(model)
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshot").mkdir()
    for number, path in enumerate(sorted(model.iterdir())):  # as in the cache of the Hub
        (tmp_path / "blobs" / str(number)).write_bytes(path.read_bytes())
        (tmp_path / "snapshot" / path.name).symlink_to(f"../blobs/{number}")
    assert digest(tmp_path / "snapshot") == before
    (model / "b.bin").rename(model / "c.bin")
    assert digest(model) != before


def test_a_file_of_several_is_read_with_the_others(tmp_path: Path) -> None:
    for number in (1, 2):
        (tmp_path / f"[m]-0000{number}-of-00002.gguf").write_bytes(bytes([number]))
    (tmp_path / "m-00001-of-00002.gguf").write_bytes(b"another model")
    before = digest(tmp_path / "[m]-00001-of-00002.gguf")
    overwrite(tmp_path / "[m]-00002-of-00002.gguf", 0)
    after = digest(tmp_path / "[m]-00001-of-00002.gguf")
    overwrite(tmp_path / "m-00001-of-00002.gguf", 0)
    assert before != after == digest(tmp_path / "[m]-00001-of-00002.gguf")


def rewrite(path: Path) -> None:
    overwrite(path, 5)


def replace(path: Path) -> None:
    fresh = path.with_suffix(".new")
    fresh.write_bytes(path.read_bytes())
    os.utime(fresh, ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns))
    fresh.rename(path)


def link_elsewhere(path: Path) -> None:
    other = path.parent / "other"
    path.rename(other)
    (path.parent / "third").write_bytes(other.read_bytes())
    path.symlink_to("third")


@pytest.mark.parametrize("change", [rewrite, replace, link_elsewhere, Path.unlink])
@pytest.mark.parametrize("name", ["b.bin", "modeling.py"])
def test_files_that_change_after_the_reading_was_made_have_no_digest(
    model: Path, change: Callable[[Path], None], name: str
) -> None:
    reading = WeightsReading(model)
    change(model / name)
    reading.read(DigestMemory(None), threading.Event())
    with pytest.raises(LayoutMismatch, match=name):
        reading.find()


@pytest.mark.parametrize("change", ["rewrites", "replaces", "adds"])
def test_files_that_change_while_they_are_read_have_no_digest(model: Path, change: str) -> None:
    reading = WeightsReading(model)

    def act() -> None:
        if change == "adds":
            (model / "z.bin").write_bytes(b"late")
        elif change == "rewrites":
            rewrite(model / "a.safetensors")
        else:
            replace(model / "a.safetensors")

    reading.read(DigestMemory(None), threading.Event(), act)
    with pytest.raises(LayoutMismatch, match=r"z\.bin" if change == "adds" else r"a\.safetensors"):
        reading.find()


def test_a_place_without_weights_has_no_files(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "x.py").write_text("")
    for place in (tmp_path, tmp_path / "absent", tmp_path / "config.json"):
        assert not WeightsReading(place, ("config.json",)).has_files


def waiting_for(pipe: Path, read: Callable[..., None]) -> Callable[..., None]:
    """Read when somebody has written into the pipe."""

    def wait_and_read(*arguments: Any) -> None:
        pipe.read_bytes()
        read(*arguments)

    return wait_and_read


def test_the_reader_reads_in_the_background_and_shows_how_far_it_is(model: Path, tmp_path: Path) -> None:
    reader, first, second = WeightsReader(DigestMemory(None), LOG), WeightsReading(model), WeightsReading(model)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    first.read = waiting_for(pipe, first.read)  # type: ignore[method-assign]
    reader.begin_reading(first)
    reader.begin_reading(second)
    assert (first.find(), second.find(), second.done, second.size) == (None, None, 0, 4 * SIZE)
    pipe.write_bytes(b"go")
    assert second.wait(60)
    assert first.find() == second.find() == digest(model)
    assert second.done == second.size
    again = WeightsReading(model)
    reader.begin_reading(again)
    assert again.wait(60), "the thread had nothing to do meanwhile"
    reader.stop()


def test_a_reader_that_is_stopped_leaves_its_place(model: Path) -> None:
    reading, stop = WeightsReading(model), threading.Event()
    reading.read(DigestMemory(None), stop, stop.set)
    with pytest.raises(LayoutMismatch, match="was ended"):
        reading.find()


def failing(error: BaseException) -> Callable[..., None]:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    return fail


@pytest.mark.parametrize("error", [MemoryError(), ValueError("of no kind that is known")])
def test_a_reading_that_fails_is_refused_and_the_next_one_is_read(
    model: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    reader, failed = WeightsReader(DigestMemory(None), LOG), WeightsReading(model)
    monkeypatch.setattr(WeightsReading, "_read_whole", failing(error))
    reader.begin_reading(failed)
    assert failed.wait(60)
    with pytest.raises(LayoutMismatch, match=type(error).__name__):
        failed.find()
    monkeypatch.undo()
    following = WeightsReading(model)
    reader.begin_reading(following)
    assert following.wait(60)
    assert following.find() == digest(model)
    reader.stop()


def test_a_reading_without_a_thread_is_refused_and_the_next_one_is_read(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, refused, following = WeightsReader(DigestMemory(None), LOG), WeightsReading(model), WeightsReading(model)
    monkeypatch.setattr(threading.Thread, "start", failing(RuntimeError("can't start new thread")))
    reader.begin_reading(refused)
    assert refused.wait(0)
    with pytest.raises(LayoutMismatch, match="can't start new thread"):
        refused.find()
    reader.stop()
    monkeypatch.undo()
    reader = WeightsReader(DigestMemory(None), LOG)
    monkeypatch.setattr(threading.Thread, "start", failing(RuntimeError("can't start new thread")))
    reader.begin_reading(WeightsReading(model))
    monkeypatch.undo()
    reader.begin_reading(following)
    assert following.wait(60)
    assert following.find() == digest(model)
    reader.stop()


def later(tmp_path: Path) -> int:
    """Nanoseconds since 1970, when everything that was made until now is older, and what is made from now on is younger."""
    path = tmp_path / "time"
    path.touch()
    now_ns = path.stat().st_ctime_ns

    def has_passed() -> bool:
        path.touch()
        return path.stat().st_ctime_ns > now_ns + 2 * TICK_NS

    wait_until(has_passed, "time has passed")
    return now_ns


def rewritten(model: Path) -> str:
    rewrite(model / "b.bin")
    return "b.bin"


def with_another_inode(model: Path) -> str:
    replace(model / "b.bin")
    return "b.bin"


def exchanged(model: Path) -> str:
    """Another directory, whose files are as old, is in its place."""
    model.rename(model.parent / "before")
    (model.parent / "successor").rename(model)
    return "further"


def linked_anew(model: Path) -> str:
    (model.parent / "link").unlink()
    (model.parent / "link").symlink_to("successor")
    return "link"


def linked_anew_inside(model: Path) -> str:
    (model / "b.bin").unlink()
    (model / "b.bin").symlink_to("../successor/b.bin")
    return "b.bin"


@pytest.mark.parametrize("change", [rewritten, with_another_inode, exchanged, linked_anew, linked_anew_inside])
def test_weights_are_as_old_as_the_process_that_has_loaded_them(
    model: Path, tmp_path: Path, change: Callable[[Path], str]
) -> None:
    shutil.copytree(model, tmp_path / "successor")
    (tmp_path / "link").symlink_to("model")
    (tmp_path / "further").symlink_to(tmp_path / "link")
    since_ns = later(tmp_path)
    place = tmp_path / "further"
    WeightsReading(place, since_ns=since_ns)
    (tmp_path / "neighbour").mkdir()
    WeightsReading(place, since_ns=since_ns)
    changed = change(model)
    with pytest.raises(LayoutMismatch, match=f"{changed}' has changed since the engine started"):
        WeightsReading(place, since_ns=since_ns)
    WeightsReading(place)


def test_a_file_alone_may_have_younger_neighbours(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"weights")
    since_ns = later(tmp_path)
    (tmp_path / "other.gguf").write_bytes(b"another")
    assert WeightsReading(path, since_ns=since_ns).has_files
    path.touch()
    with pytest.raises(LayoutMismatch, match=r"model\.gguf"):
        WeightsReading(path, since_ns=since_ns)


def test_a_link_to_a_later_part_may_not_be_younger(tmp_path: Path) -> None:
    first, second = tmp_path / "m-00001-of-00002.gguf", tmp_path / "m-00002-of-00002.gguf"
    for path in (first, tmp_path / "a", tmp_path / "b"):
        path.write_bytes(b"weights")
    second.symlink_to("a")
    since_ns = later(tmp_path)
    assert WeightsReading(first, since_ns=since_ns).has_files
    second.unlink()
    second.symlink_to("b")
    with pytest.raises(LayoutMismatch, match="m-00002-of-00002"):
        WeightsReading(first, since_ns=since_ns)


def test_links_in_a_circle_end(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    assert not WeightsReading(tmp_path / "a", since_ns=0).has_files
