"""The version of a build, as git counts it: scikit-build-core asks here (pyproject.toml).

0.1.0 on a commit with the tag v0.1.0, and before it 0.1.0.dev<commits>+g<commit>, so that what is newer is installed over
what is older; `.dirty` where a file is not the commit's. A source distribution has the version that it was made with in its
PKG-INFO. Where neither is there, or git has not all commits, none are counted. After a release, `RELEASE` becomes the next.
"""

import subprocess
from email.parser import HeaderParser
from pathlib import Path
from typing import Any

RELEASE = "0.1.0"


def dynamic_metadata(_settings: dict[str, Any], _project: dict[str, Any]) -> dict[str, str]:
    """The hook. A build's current directory is that of its source."""
    return {"version": find_version(Path.cwd())}


def find_version(source: Path) -> str:
    """The version of the source in a folder."""
    written = source / "PKG-INFO"
    if written.exists():
        return str(HeaderParser().parsestr(written.read_text(encoding="utf-8"))["Version"])
    top = _ask_git(source, "rev-parse", "--show-toplevel")
    if not top or Path(top).resolve() != source.resolve():  # a folder within somebody else's repository
        return f"{RELEASE}.dev0"
    commit = _ask_git(source, "rev-parse", "--short=9", "HEAD")
    is_whole = _ask_git(source, "rev-parse", "--is-shallow-repository") == "false"
    count = _ask_git(source, "rev-list", "--count", "HEAD") if is_whole else "0"
    tags = _ask_git(source, "tag", "--points-at", "HEAD").split()
    dirty = "dirty" if _ask_git(source, "status", "--porcelain", "--untracked-files=no") else ""
    if f"v{RELEASE}" in tags:
        return f"{RELEASE}+{dirty}".removesuffix("+")
    return f"{RELEASE}.dev{count}+g{commit}.{dirty}".removesuffix(".")


def _ask_git(source: Path, *words: str) -> str:
    """What git answers; nothing where there is none, or it refuses."""
    try:
        command = ["git", "-C", str(source), *words]
        ended = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 - words of this file
    except FileNotFoundError:
        return ""
    return ended.stdout.strip() if ended.returncode == 0 else ""
