"""Place of a keeper: each row of the page's table, by what /proc would show."""

import os
from pathlib import Path

import pytest

from kvpool.server.keeping.keeper_place import why_it_may_end

KEEPER = 4711
PID_NAMESPACE, CGROUP_NAMESPACE = 0xEFFFFFFC, 0xEFFFFFFB


def _proc(
    folder: Path,
    keeper: str,
    daemon: str,
    *,
    pid_namespace: int = PID_NAMESPACE,
    cgroup_namespace: int = CGROUP_NAMESPACE,
) -> Path:
    """Control groups of the keeper and the daemon, lines joined by blanks, and the keeper's namespaces."""
    for name, groups in ((str(KEEPER), keeper), ("self", daemon)):
        (folder / name / "ns").mkdir(parents=True)
        (folder / name / "cgroup").write_text("".join(f"{line}\n" for line in groups.split()))
    os.symlink(f"pid:[{pid_namespace}]", folder / str(KEEPER) / "ns/pid")
    os.symlink(f"cgroup:[{cgroup_namespace}]", folder / str(KEEPER) / "ns/cgroup")
    return folder


@pytest.mark.parametrize(
    ("keeper", "daemon"),
    [
        ("0::/", "0::/"),
        ("0::/", "0::/system.slice/kvpoold.service"),
        ("0::/system.slice/keeper.service", "0::/"),
        ("0::/user.slice/user-0.slice/session-3.scope", "0::/system.slice/kvpoold.service"),
        ("0::/../../user.slice", "0::/inner"),  # the daemon has a namespace of groups within the keeper's
        ("9:name=systemd:/ 4:memory:/ 0::/", "9:name=systemd:/ 4:memory:/ 0::/"),
        ("3:cpu,cpuacct:/a 1:name=systemd:/b:c", "3:cpu,cpuacct:/b 1:name=systemd:/a"),
    ],
)
def test_what_has_no_group_but_the_root_in_common_goes_on(tmp_path: Path, keeper: str, daemon: str) -> None:
    assert why_it_may_end(KEEPER, _proc(tmp_path, keeper, daemon)) == ""


@pytest.mark.parametrize(
    ("keeper", "daemon", "common"),
    [
        ("0::/system.slice/own.service", "0::/system.slice/own.service", "/system.slice/own.service"),
        ("0::/own.service/below", "0::/own.service", "/own.service"),
        ("0::/own.service", "0::/own.service/below", "/own.service"),
        (
            "0::/user.slice/user-7/session-3.scope",
            "0::/user.slice/user-7/session-5.scope",
            "/user.slice/user-7",
        ),
        ("0::/slurm/job_1/step_0/task_0", "0::/slurm/job_1/step_0/task_1", "/slurm/job_1/step_0"),
        ("0::/docker/4f2a", "0::/docker/4f2a", "/docker/4f2a"),
        ("0::/..", "0::/inner", "/.."),  # the keeper is where the daemon's namespace of groups has its root, or above
        ("0::/../..", "0::/inner", "/../.."),
        # One hierarchy of several is enough.
        ("4:memory:/ 3:freezer:/job 1:name=systemd:/", "4:memory:/ 3:freezer:/job 1:name=systemd:/", "/job"),
    ],
)
def test_what_has_a_group_in_common_may_end_with_it(tmp_path: Path, keeper: str, daemon: str, common: str) -> None:
    reason = why_it_may_end(KEEPER, _proc(tmp_path, keeper, daemon))
    assert reason == f"it is in the control group {common}, as the daemon is"


@pytest.mark.parametrize("kind", ["pid", "cgroup"])
def test_what_is_in_a_container_ends_with_it(tmp_path: Path, kind: str) -> None:
    proc = _proc(tmp_path, "0::/", "0::/", **{f"{kind}_namespace": 4026532231})
    assert why_it_may_end(KEEPER, proc) == f"it is in a container, by its {kind} namespace"


def _remove_process(proc: Path) -> None:
    (proc / str(KEEPER)).rename(proc / "gone")


def _remove_groups(proc: Path) -> None:
    (proc / str(KEEPER) / "cgroup").unlink()


def _empty_groups(proc: Path) -> None:
    (proc / str(KEEPER) / "cgroup").write_text("")


def _break_groups(proc: Path) -> None:
    (proc / str(KEEPER) / "cgroup").write_text("nonsense\n")


def _break_path(proc: Path) -> None:
    (proc / str(KEEPER) / "cgroup").write_text("0::relative\n")


def _add_hierarchy(proc: Path) -> None:
    (proc / str(KEEPER) / "cgroup").write_text("0::/\n1:name=other:/\n")


def _remove_own(proc: Path) -> None:
    (proc / "self/cgroup").unlink()


def _hide_namespaces(proc: Path) -> None:
    (proc / str(KEEPER) / "ns/cgroup").unlink()


@pytest.mark.parametrize(
    "change",
    [
        _remove_process,
        _remove_groups,
        _empty_groups,
        _break_groups,
        _break_path,
        _add_hierarchy,
        _remove_own,
        _hide_namespaces,
    ],
)
def test_what_is_unknown_may_end(tmp_path: Path, change: object) -> None:
    proc = _proc(tmp_path, "0::/", "0::/")
    assert why_it_may_end(KEEPER, proc) == ""
    assert callable(change)
    change(proc)
    assert why_it_may_end(KEEPER, proc) == f"{proc} does not show where it is"


def test_this_machine_shows_where_a_process_is() -> None:
    assert "does not show" not in why_it_may_end(os.getpid())
