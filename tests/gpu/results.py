"""Results of the GPU run: one JSON file, written whole after each figure, and one table."""

import json
import os
from pathlib import Path
from typing import Any

FILE_NAME = "gpu.json"


class Results:
    """See the module. A file of another card or version is begun anew."""

    def __init__(self, directory: Path, machine: dict[str, Any]) -> None:
        """`machine`: what the results are of."""
        directory.mkdir(parents=True, exist_ok=True)
        self._file = directory / FILE_NAME
        found = self._read()
        is_same = found.get("machine") == machine
        self.parts: dict[str, dict[str, Any]] = found.get("parts", {}) if is_same else {}
        self.machine = machine
        self._write()

    def begin(self, part: str) -> None:
        """Forget what an earlier run of a part has found."""
        self.parts[part] = {"verdict": "not done", "why": "", "seconds": 0.0, "figures": []}
        self._write()

    def add(self, part: str, figure: dict[str, Any]) -> None:
        """One figure more."""
        self.parts[part]["figures"].append(figure)
        self._write()

    def end(self, part: str, verdict: str, why: str, seconds: float) -> None:
        """The part's verdict."""
        self.parts[part].update(verdict=verdict, why=why, seconds=round(seconds, 1))
        self._write()

    def is_done(self, part: str) -> bool:
        """Whether an earlier run has ended it well."""
        return self.parts.get(part, {}).get("verdict") == "ok"

    def below(self) -> list[str]:
        """Names of figures that do not reach their bar."""
        return [
            f"{part}: {figure['name']}: {figure['ratio']:.2f}, expected {figure['bar']:g}"
            for part, found in self.parts.items()
            for figure in found["figures"]
            if figure["bar"] is not None and figure["ratio"] < figure["bar"]
        ]

    def table(self) -> str:
        """All of it, as Markdown."""
        lines = [", ".join(f"{name} {value}" for name, value in self.machine.items()), ""]
        for part, found in self.parts.items():
            why = f": {found['why']}" if found["why"] else ""
            lines.append(f"{part}: {found['verdict']}{why} ({found['seconds']:g} s)")
        lines += ["", "| part | what | median | least to most | ratio | bar |", "|---|---|---|---|---|---|"]
        for part, found in self.parts.items():
            for one in found["figures"]:
                spread = f"{one['least']:.3g} to {one['most']:.3g}"
                ratio = "" if one["ratio"] is None else f"{one['ratio']:.2f}"
                bar = "" if one["bar"] is None else f"{one['bar']:g}"
                lines.append(
                    f"| {part} | {one['name']} | {one['median']:.3g} {one['unit']} | {spread} | {ratio} | {bar} |"
                )
        return "\n".join(lines) + "\n"

    def _read(self) -> dict[str, Any]:
        try:
            found = json.loads(self._file.read_text())
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    def _write(self) -> None:
        fresh = self._file.with_suffix(".new")
        fresh.write_text(json.dumps({"machine": self.machine, "parts": self.parts}, indent=1) + "\n")
        os.replace(fresh, self._file)
