"""Verdicts on a sample of campaigns: which failures end continuous integration, and which it only reports.

Campaigns attack, kill and overload daemons, so that on a busy machine one of many waits may run out.
With KVPOOL_FAIL_ON=faults a run fails for wrong bytes, for a stored chunk that is lost and for a process that died; every other
failure is listed with the seed that draws the same sample again. Without it every failure fails the run, as everywhere else.
"""

import os
import re

import pytest

from tests.rigs.runs.sampling import SAMPLE_SEED

NAME = "KVPOOL_FAIL_ON"
# Looked for in the lines of a failure that pytest marks: the statement (>) and what it found (E).
FAULT = re.compile(
    r"wrong|corrupt|verify|payload|acknowledged|\blost\b|== (expected|plain|computed)|\.tokens\(|tokens_of_answer"
    r"|other bytes|attends to|\bequal\(|array_equal|tobytes\(\) ==|is_dead|crash|assert_sound|problems\(\)|error of its own"
    r"|SIG[A-Z]{3}|signal|anitizer",
    re.IGNORECASE,
)
# A line of a daemon's log that a failure quotes: it describes what the daemon did, and is no finding.
QUOTED = re.compile(r"E\s+\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d")
# A finding that says only that time ran out. The statement that waited may be about anything, and what is quoted beside it too.
LATE = re.compile(r"TimeoutError|TimeoutExpired|timed out|not within [\d.]+ s")
# Between an exception and the one that followed from it: each is judged by itself.
CHAINED = re.compile(
    r"^(?:During handling of the above exception|The above exception was the direct cause).*$", re.MULTILINE
)
# What pytest reports where the process of the tests itself has died.
DIED = re.compile(r"^worker '\w+' crashed", re.MULTILINE)


def is_fault(failure: str) -> bool:
    """True if a failure shows a fault that must not happen even once."""
    return bool(DIED.search(failure)) or any(_shows_fault(part.splitlines()) for part in CHAINED.split(failure))


def _shows_fault(lines: list[str]) -> bool:
    """Whether one exception of a failure shows such a fault."""
    findings = [line for line in lines if line.startswith("E") and not QUOTED.match(line)]
    if findings and LATE.search(findings[0]):
        looked_at = findings[1:]
    else:
        looked_at = findings + [line for line in lines if line.startswith(">")]
    return any(FAULT.search(line) for line in looked_at)


def _fails_on_faults_alone() -> bool:
    text = os.environ.get(NAME, "")
    if text not in ("", "faults"):
        raise pytest.UsageError(f"{NAME}={text}: expected nothing, or faults")
    return bool(text)


def pytest_configure() -> None:
    """Refuse what is no verdict."""
    _fails_on_faults_alone()


def _failures(config: pytest.Config) -> list[pytest.TestReport]:
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None:
        return []
    found = [*reporter.stats.get("failed", []), *reporter.stats.get("error", [])]
    return [report for report in found if isinstance(report, pytest.TestReport)]


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Let a run pass whose failures are no faults."""
    failures = _failures(session.config)
    is_failed = session.exitstatus == pytest.ExitCode.TESTS_FAILED
    if _fails_on_faults_alone() and is_failed and failures:
        has_fault = any(is_fault(report.longreprtext) for report in failures)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED if has_fault else pytest.ExitCode.OK


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """List the verdict on each failure, and how to draw the same sample."""
    failures = _failures(config)
    if not _fails_on_faults_alone() or not failures:
        return
    terminalreporter.section("verdicts")
    for report in failures:
        verdict = "FAULT: the run fails" if is_fault(report.longreprtext) else "reported only"
        terminalreporter.write_line(f"{report.nodeid}: {verdict}", bold=True)
    terminalreporter.write_line(f"the same again: KVPOOL_SEED={config.stash[SAMPLE_SEED]}")
