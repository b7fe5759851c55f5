"""An image without its builder: the steps of packaging/Containerfile, run on bare machines, a stage on each.

The Containerfile and its ignore file are read by parsers that others keep; there is no second list of steps. The machine of a
release stands for the base that FROM names: that has the same packages by the same debootstrap, without their documentation. An
instruction that is not known here fails.
"""

import glob
import json
import re
import shlex
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.packages.roots import TREE, Machine
from tests.packages.tools import ask

CONTAINERFILE = TREE / "packaging/Containerfile"
RELEASES = {"debian:12-slim": "bookworm"}
# What the slim base leaves out of its packages, and of what is installed later; archives and lists are of the machine.
NOT_IN_SLIM = (
    "/usr/share/doc",
    "/usr/share/info",
    "/usr/share/locale",
    "/usr/share/man",
    "/var/cache",
    "/var/lib/apt/lists",
)
# What is mounted in the machine; no part of the image.
NOT_IN_IMAGE = ("/packages", "/dev", "/proc", "/sys", "/run", "/tmp")
PARSED = """
from dockerfile_parse import DockerfileParser
steps = DockerfileParser(fileobj=open(question, "rb+")).structure
json.dump([[step["instruction"], step["value"]] for step in steps if step["instruction"] != "COMMENT"], sys.stdout)
"""
CONTEXT = """
from docker.utils.build import exclude_paths
lines = [line for line in open(question + "/.dockerignore").read().splitlines() if not line.startswith("#")]
json.dump(sorted(exclude_paths(question, lines)), sys.stdout)
"""


@dataclass
class Image:
    """A built image: the machine that has its files, and what its builder would write down beside them."""

    machine: Machine
    environment: list[str] = field(default_factory=list)
    user: str = "0:0"
    volumes: list[str] = field(default_factory=list)
    entry: list[str] = field(default_factory=list)
    health: list[str] = field(default_factory=list)
    health_flags: dict[str, str] = field(default_factory=dict)

    def exports(self) -> str:
        """The start of a script that runs in it: its environment."""
        return "".join(f"export {pair}\n" for pair in self.environment)

    def bytes_used(self) -> int:
        """What its files take, the base included."""
        left_out = " ".join(f"--exclude={path}" for path in (*NOT_IN_SLIM, *NOT_IN_IMAGE))
        return int(self.machine.run_script(f"du -s --block-size=1 {left_out} /").split()[0])


def steps_of(file: Path = CONTAINERFILE) -> list[tuple[str, str]]:
    """Instructions of a Containerfile and their values."""
    return [(name, value) for name, value in ask(PARSED, str(file))]


def context() -> list[str]:
    """The files of the tree that a builder is given."""
    files: list[str] = ask(CONTEXT, str(TREE))
    return files


def build(start: Callable[[str], Machine], prepare: Callable[[Machine], None]) -> Image:
    """Run the steps. `prepare`: what a closed network gives every machine beforehand, such as where its packages are."""
    given = set(context())
    arguments: dict[str, str] = {}
    stages: dict[str, Image] = {}
    image: Image | None = None
    for name, value in steps_of():
        if name == "ARG":
            assert image is None, f"an ARG of a stage is not known here: {value}"
            key, _, default = value.partition("=")
            arguments[key] = default
            continue
        if name == "FROM":
            base, _, stage = value.partition(" AS ")
            for key, default in arguments.items():
                base = base.replace(f"${{{key}}}", default)
            image = Image(start(RELEASES[base]))
            prepare(image.machine)
            stages[stage] = image
            continue
        assert image is not None, f"{name} before FROM"
        if name == "RUN":
            image.machine.run_script(image.exports() + value)
        elif name == "COPY":
            _copy(image, value, stages, given)
        elif name == "ENV":
            image.environment += shlex.split(value)
        elif name == "USER":
            image.user = value
        elif name == "VOLUME":
            image.volumes = json.loads(value)
        elif name == "ENTRYPOINT":
            image.entry = json.loads(value)
        elif name == "HEALTHCHECK":
            flags, _, command = value.partition(" CMD ")
            image.health = json.loads(command)
            image.health_flags = dict(re.findall(r"--([a-z-]+)=(\S+)", flags))
        else:
            assert name == "LABEL", f"{name} is not known here"
    assert image is not None
    return image


def _copy(image: Image, value: str, stages: dict[str, Image], given: set[str]) -> None:
    words = value.split()
    target = image.machine.root / words[-1].lstrip("/")
    if words[0].startswith("--from="):
        source = stages[words[0].removeprefix("--from=")].machine.root / words[1].lstrip("/")
        assert source.is_dir(), f"COPY of a file from a stage is not known here: {value}"
        shutil.copytree(source, target, symlinks=True)
        return
    assert words[-1].endswith("/"), f"COPY to a file is not known here: {value}"
    target.mkdir(parents=True)
    for file in _sources(words[:-1], given):
        shutil.copy(TREE / file, target)


def _sources(patterns: Sequence[str], given: set[str]) -> list[str]:
    found = []
    for pattern in patterns:
        matching = [name for name in glob.glob(pattern, root_dir=TREE) if name in given]
        assert matching, f"COPY {pattern}: no such file is given to the builder"
        found += matching
    return found
