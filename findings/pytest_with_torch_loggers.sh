#!/bin/sh
# Once torch is imported, pytest since 9.1 adds its handlers to every one of torch's forty loggers for each phase of each test.
#
#   findings/pytest_with_torch_loggers.sh        needs python3 with its venv module; installs into a temporary folder
#
# pytest captures what is logged in each phase of a test (setup, call, teardown) by handlers. Since 9.1.0 it adds them beside the root
# logger to each logger that does not propagate, and takes them away again, so that what these log is captured too. torch takes
# `propagate` from its loggers when it is imported. Both are meant; together a test that does nothing calls Logger.addHandler 344 times
# instead of 8, each under the lock of logging: about 1.5 ms a test, 10 s of processor time in a suite of 6,000 tests that import torch
# anywhere. Setting `propagate` of torch's loggers to True after the import ends it.
#
# Seen, CPython 3.11, torch 2.13.0: calls of addHandler for a test
#   pytest 9.2.0 without torch: 8
#   pytest 9.2.0 with torch: 344
#   pytest 9.0.3 with torch: 8
# Fails when that changes.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
pip="$folder/venv/bin/python -m pip install --quiet --disable-pip-version-check"
$pip torch==2.13.0 pytest==9.2.0 >&2

cat >"$folder/conftest.py" <<'PYTHON'
import logging
import os

added = 0
original = logging.Logger.addHandler


def counting(self, handler):
    global added
    added += 1
    original(self, handler)


logging.Logger.addHandler = counting
if os.environ.get("WITH_TORCH"):
    import torch  # noqa: F401


def pytest_runtest_protocol(item):
    global added
    if item.name == "test_second":
        added = 0


def pytest_unconfigure():
    print("handlers", added)
PYTHON
cat >"$folder/test_nothing.py" <<'PYTHON'
def test_first():
    pass


def test_second():
    pass
PYTHON

count() {
  (cd "$folder" && WITH_TORCH=$1 venv/bin/python -m pytest -q -p no:cacheprovider test_nothing.py) | sed -n 's/^handlers //p'
}
without=$(count "")
with=$(count yes)
$pip pytest==9.0.3 >&2
before=$(count yes)
echo "pytest 9.2.0, without torch: $without; with torch 2.13.0: $with; pytest 9.0.3 with torch: $before"
[ "$without" -eq 8 ] && [ "$before" -eq 8 ] && [ "$with" -eq 344 ]
