"""Writes the bill of materials of a release in CycloneDX's form: what of others is in its packages, with versions and hashes.

    python packaging/bill_of_materials.py VERSION FILE

In the Debian package and the image are the Python packages of packaging/debian/packages.txt; in every native module liburing,
and what the compiler and the binding library add to it. The same tree gives the same bytes: dates are SOURCE_DATE_EPOCH.
"""

import os
import re
import sys
import uuid
from datetime import datetime, timezone
from pathlib import Path

from cyclonedx.model import HashAlgorithm, HashType
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.output.json import JsonV1Dot6
from packageurl import PackageURL

TREE = Path(__file__).parents[1]
# A line of a file of requirements, without its hashes.
PINNED = re.compile(r"^(?P<name>[\w.-]+)==(?P<version>[\w.]+)")
# Tools of which a part is in the native module: the binding library, and the compiler's C++ library.
IN_THE_MODULE = ("nanobind", "ziglang")


def pinned(file: Path) -> list[Component]:
    """The packages that a file of requirements pins, with their hashes."""
    found = []
    for entry in file.read_text(encoding="utf-8").replace("\\\n", " ").splitlines():
        match = PINNED.match(entry)
        if match:
            hashes = [
                HashType(alg=HashAlgorithm.SHA_256, content=digest) for digest in re.findall(r"sha256:(\w+)", entry)
            ]
            found.append(component(match["name"], match["version"], "pypi", hashes))
    return found


def component(name: str, version: str, kind: str, hashes: list[HashType] | None = None) -> Component:
    """A package of others. `kind`: where it comes from, as package URLs name it."""
    url = PackageURL(type=kind, name=name, version=version, namespace="debian" if kind == "deb" else None)
    return Component(type=ComponentType.LIBRARY, name=name, version=version, purl=url, bom_ref=str(url), hashes=hashes)


def liburing() -> Component:
    """The liburing that wheels were built with: `make wheels` has downloaded it."""
    (package,) = (TREE / "build/packages/debian-amd64").glob("liburing-dev_*.deb")
    return component("liburing", package.name.split("_")[1].replace("%3a", ":"), "deb")


def main() -> None:
    """See the module."""
    version, file = sys.argv[1:]
    root = Component(type=ComponentType.APPLICATION, name="kvpool", version=version, bom_ref=f"kvpool@{version}")
    tools = [*pinned(TREE / "packaging/build-tools.txt"), *pinned(TREE / "packaging/wheel-tools.txt")]
    parts = [
        *pinned(TREE / "packaging/debian/packages.txt"),
        *(tool for tool in tools if tool.name in IN_THE_MODULE),
        liburing(),
    ]
    bom = Bom(components=parts, serial_number=uuid.uuid5(uuid.NAMESPACE_URL, f"kvpool@{version}"))
    bom.metadata.component = root
    bom.metadata.timestamp = datetime.fromtimestamp(int(os.environ["SOURCE_DATE_EPOCH"]), timezone.utc)
    bom.register_dependency(root, parts)
    Path(file).write_text(JsonV1Dot6(bom).output_as_string(indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
