"""Second runs of failed tests: listed at the end of a run, and never accepted after wrong bytes or a crash.

A shared machine may stop for a second, and a test that waits for something then fails once in a thousand runs. Continuous
integration sets RERUNS=1 (see the Makefile): a test that fails runs once more. Its first failure stays in the output. Where
that failure shows wrong bytes, a dead process or a sanitizer's report, the run fails whatever the second run says.
"""

import re

import pytest

# Looked for in the lines of a failure that pytest marks: the statement (>) and what it found (E).
UNFORGIVABLE = re.compile(
    r"wrong|corrupt|verify|payload|== (expected|plain|computed)|\.tokens\(|tokens_of_answer"
    r"|is_dead|assert_sound|problems\(\)|SIG[A-Z]{3}|signal|anitizer",
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


def is_unforgivable(failure: str) -> bool:
    """True if a failure shows a fault that must not happen even once."""
    return any(_shows_fault(part.splitlines()) for part in CHAINED.split(failure))


def _shows_fault(lines: list[str]) -> bool:
    """Whether one exception of a failure shows such a fault."""
    findings = [line for line in lines if line.startswith("E") and not QUOTED.match(line)]
    if findings and LATE.search(findings[0]):
        looked_at = findings[1:]
    else:
        looked_at = findings + [line for line in lines if line.startswith(">")]
    return any(UNFORGIVABLE.search(line) for line in looked_at)


def _first_runs(terminalreporter: pytest.TerminalReporter) -> list[pytest.TestReport]:
    return [report for report in terminalreporter.stats.get("rerun", []) if isinstance(report, pytest.TestReport)]


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail the run where a second run must not count."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is not None and any(is_unforgivable(report.longreprtext) for report in _first_runs(reporter)):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the first failure of each test that ran twice."""
    reports = _first_runs(terminalreporter)
    if not reports:
        return
    terminalreporter.section("tests that ran twice, and how they failed first")
    for report in reports:
        verdict = "not forgiven: the run fails" if is_unforgivable(report.longreprtext) else "ran once more"
        terminalreporter.write_line(f"{report.nodeid}: {verdict}", bold=True)
        terminalreporter.write_line(report.longreprtext)
