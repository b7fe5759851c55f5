"""The trace reader: every form, every fault named, and no input that does anything but read or refuse."""

import contextlib
import gzip
import io
import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvpool_tools.sim.traces import BLOCK_TOKENS, Trace, TraceError, TraceRequest, find_traces

GOOD = {"timestamp": 27482, "input_length": 2 * BLOCK_TOKENS + 7, "output_length": 3, "hash_ids": [0, 5, 9]}
READ = TraceRequest(27.482, 2 * BLOCK_TOKENS + 7, 3, (0, 5), 9)

ARRAYS: dict[str, Any] = {
    "t": np.array([0.0, 1.5]),
    "n_in": np.array([BLOCK_TOKENS, 2 * BLOCK_TOKENS + 1], np.int32),
    "n_out": np.array([1, 0], np.int32),
    "leaf": np.array([0, 1], np.int32),
    "parent": np.array([-1, 0], np.int32),
}


def _write(path: Path, *lines: object) -> Trace:
    text = "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines)
    opener: Callable[..., Any] = gzip.open if path.name.endswith(".gz") else open
    with opener(path, "wb") as file:
        file.write(text.encode())
    return Trace(path)


def _archive(path: Path, **changed: Any) -> Trace:
    np.savez(path, **{name: value for name, value in {**ARRAYS, **changed}.items() if value is not None})
    return Trace(path)


def _refusal(trace: Trace) -> str:
    with pytest.raises(TraceError) as refused:
        list(trace.requests())
    text = str(refused.value)
    assert text.startswith(str(trace.path))
    assert ", expected " in text
    return text


@pytest.mark.parametrize("name", ["conversation.jsonl", "conversation.jsonl.gz"])
def test_json_lines_give_the_full_blocks_of_each_request(tmp_path: Path, name: str) -> None:
    trace = _write(tmp_path / name, GOOD, {**GOOD, "input_length": 3 * BLOCK_TOKENS})
    assert trace.name == "conversation"
    assert list(trace.requests()) == [READ, TraceRequest(27.482, 3 * BLOCK_TOKENS, 3, (0, 5, 9))]
    assert next(iter(trace.requests())) == READ, "a trace can be read again"


def test_an_archive_gives_the_path_from_leaf_to_root(tmp_path: Path) -> None:
    assert list(_archive(tmp_path / "agents.npz").requests()) == [
        TraceRequest(0.0, BLOCK_TOKENS, 1, (0,)),
        TraceRequest(1.5, 2 * BLOCK_TOKENS + 1, 0, (0, 1)),
    ]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("nonsense", "no JSON"),
        ("", "no JSON"),
        ("[" * 100_000, "no JSON"),
        ("[1]", "the line is [1], expected a JSON object"),
        ({**GOOD, "timestamp": -1}, "timestamp is -1, expected milliseconds"),
        ({**GOOD, "timestamp": "0"}, "timestamp is '0'"),
        ({**GOOD, "timestamp": True}, "timestamp is True"),
        ({**GOOD, "timestamp": float("nan")}, "timestamp is nan"),
        ({**GOOD, "timestamp": 10**400}, "timestamp is 1"),
        ({**GOOD, "input_length": 0}, "input_length is 0, expected an integer 1.."),
        ({**GOOD, "input_length": 1031.0}, "input_length is 1031.0"),
        ({**GOOD, "input_length": 1 << 40}, "input_length is 1099511627776"),
        ({**GOOD, "output_length": -2}, "output_length is -2, expected an integer 0.."),
        ({**GOOD, "output_length": None}, "output_length is None"),
        ({**GOOD, "hash_ids": "abc"}, "hash_ids is 'abc', expected a list"),
        ({**GOOD, "hash_ids": [0, 5, "9"]}, "hash_ids is '9', expected integers 0.."),
        ({**GOOD, "hash_ids": [0, 5, -9]}, "hash_ids is -9"),
        ({**GOOD, "hash_ids": [0, 5, 1 << 63]}, "hash_ids is 9223372036854775808"),
        ({**GOOD, "hash_ids": [0, 5, True]}, "hash_ids is True"),
        ({**GOOD, "hash_ids": [0]}, "hash_ids has 1 ids, expected 2 or 3 ids for 1031 tokens in blocks of 512"),
        ({**GOOD, "hash_ids": [0, 5, 9, 11]}, "hash_ids has 4 ids"),
        ({**GOOD, "hash_ids": [0, 5, 0]}, "hash_ids is [0, 5, 0], expected distinct ids"),
        *(
            ({key: value for key, value in GOOD.items() if key != name}, f"{name} is missing")
            for name in ("timestamp", "input_length", "output_length", "hash_ids")
        ),
    ],
)
def test_a_bad_line_is_refused_by_line_and_field(tmp_path: Path, line: object, expected: str) -> None:
    text = _refusal(_write(tmp_path / "t.jsonl.gz", GOOD, line, GOOD))
    assert ": line 2: " in text
    assert expected in text
    assert len(text) < 400 + len(str(tmp_path))


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"parent": None}, "array parent is missing"),
        ({"n_out": np.array([1], np.int32)}, "n_out has 1 entries, expected 2"),
        ({"t": np.array([0.0, np.nan])}, "entry 1: t is nan"),
        ({"n_in": np.array([0, 1025])}, "entry 0: n_in is 0"),
        ({"leaf": np.array([0, 2])}, "entry 1: leaf is 2, expected -1..1"),
        ({"leaf": np.array([0.0, 1.0])}, "leaf is float64 (2,), expected one dimension of integers"),
        ({"parent": np.array([[-1, 0]])}, "parent is int64 (1, 2), expected one dimension"),
        ({"parent": np.array([-1, 1])}, "entry 1: parent is 1, expected -1..0, an earlier block"),
        ({"n_in": np.array([512, 512])}, "entry 1: leaf 1 is more than 1 blocks deep, expected 1"),
        ({"n_in": np.array([512, 1536])}, "entry 1: leaf 1 is 2 blocks deep, expected 3"),
        ({"block": np.array([64])}, "block is [64], expected [512]"),
        ({"leaf": np.array([{}, {}], dtype=object)}, "expected a numpy archive"),
    ],
)
def test_a_bad_archive_is_refused_by_entry_and_array(tmp_path: Path, changed: dict[str, Any], expected: str) -> None:
    assert expected in _refusal(_archive(tmp_path / "t.npz", **changed))


def test_files_whose_content_does_not_fit_their_name_are_refused(tmp_path: Path) -> None:
    plain = tmp_path / "plain.jsonl.gz"
    plain.write_text(json.dumps(GOOD))
    assert "line 1: no gzip" in _refusal(Trace(plain))
    archive = tmp_path / "lines.npz"
    archive.write_text(json.dumps(GOOD))
    assert "expected a numpy archive" in _refusal(Trace(archive))
    assert "No such file or directory" in _refusal(Trace(tmp_path / "absent.jsonl"))
    assert "no request, expected at least one" in _refusal(_write(tmp_path / "empty.jsonl"))
    with pytest.raises(TraceError, match=r"name of no known form, expected one that ends with \.jsonl"):
        Trace(tmp_path / "trace.csv")


@pytest.mark.parametrize("entries", [-5, 10**15, 10**30])
def test_an_array_that_claims_impossible_entries_is_refused(tmp_path: Path, entries: int) -> None:
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "<i8", "fortran_order": False, "shape": (entries,)})
    with zipfile.ZipFile(tmp_path / "t.npz", "w") as members:
        members.writestr("t.npy", header.getvalue() + bytes(8))
    assert "expected a numpy archive" in _refusal(Trace(tmp_path / "t.npz"))


def test_a_folder_gives_its_traces_by_name(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="no trace, expected files"):
        find_traces(tmp_path)
    for name in ("b.jsonl", "a.npz", "README.md"):
        (tmp_path / name).touch()
    assert [trace.name for trace in find_traces(tmp_path)] == ["a", "b"]
    with pytest.raises(TraceError, match="expected a folder"):
        find_traces(tmp_path / "absent")


def _reads_or_refuses(trace: Trace) -> None:
    with contextlib.suppress(TraceError):  # the only way to refuse
        for request in trace.requests():
            assert len(request.hash_ids) == request.input_tokens // BLOCK_TOKENS
            assert len(set(request.hash_ids)) == len(request.hash_ids)
            assert request.at_s >= 0


any_file = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text('aZ07 "\\\n\0é漢🙂', max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(sorted(GOOD)), inner),
    max_leaves=4,
)


@any_file
@given(fields=st.dictionaries(st.sampled_from(sorted(GOOD)), json_values))
def test_any_fields_are_read_or_refused(tmp_path: Path, fields: dict[str, object]) -> None:
    _reads_or_refuses(_write(tmp_path / "t.jsonl", {**GOOD, **fields}))


@any_file
@given(at=st.integers(0), bits=st.integers(1, 255), length=st.integers(0))
@pytest.mark.parametrize("name", ["t.jsonl", "t.jsonl.gz", "t.npz"])
def test_any_damage_is_read_or_refused(tmp_path: Path, name: str, at: int, bits: int, length: int) -> None:
    trace = _archive(tmp_path / name) if name.endswith(".npz") else _write(tmp_path / name, GOOD, GOOD)
    data = bytearray(trace.path.read_bytes())
    data[at % len(data)] ^= bits
    trace.path.write_bytes(data[: 1 + length % len(data)])
    _reads_or_refuses(trace)


@pytest.mark.parametrize("kept", [0.2, 0.9])
def test_a_gzip_file_that_is_cut_off_is_refused(tmp_path: Path, kept: float) -> None:
    trace = _write(tmp_path / "t.jsonl.gz", *({**GOOD, "timestamp": number} for number in range(500)))
    data = trace.path.read_bytes()
    trace.path.write_bytes(data[: int(len(data) * kept)])
    assert "cut off or damaged" in _refusal(trace)


def test_a_conversations_id_is_read_where_there_is_one(tmp_path: Path) -> None:
    named = _write(tmp_path / "t.jsonl", {**GOOD, "session_id": 4}, {**GOOD, "session_id": None}, GOOD)
    assert [request.session for request in named.requests()] == [4, None, None]
    archive = _archive(tmp_path / "t.npz", sess=np.array([9, 0], np.int32))
    assert [request.session for request in archive.requests()] == [9, 0]
    assert [request.session for request in _archive(tmp_path / "u.npz").requests()] == [None, None]


@pytest.mark.parametrize("value", [-1, "7", 1.5, True, 1 << 63])
def test_a_conversations_id_is_a_number(tmp_path: Path, value: object) -> None:
    assert "session_id is" in _refusal(_write(tmp_path / "t.jsonl", {**GOOD, "session_id": value}))


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (np.array([1]), "sess has 1 entries, expected 2"),
        (np.array([0, -1]), "sess is -1, expected 0.."),
        (np.array([0.0, 1.0]), "expected one dimension of integers"),
    ],
)
def test_conversations_of_an_archive_are_numbers(tmp_path: Path, values: object, expected: str) -> None:
    assert expected in _refusal(_archive(tmp_path / "t.npz", sess=values))
