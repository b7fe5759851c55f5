"""Writes the daemon's options into a chart, the folder that the first argument names: into the schema of its values, and with
their defaults into files/options.json, which its templates read.

A misspelt option, one that the chart sets by itself, or values that do not go together are then refused by Helm and not by the
daemons of every node.
"""

import json
import sys
from pathlib import Path

from kvpool.config.config import OPTIONS
from kvpool.config.path_options import readable_file, secret_file

# Values of the chart, or facts of a pod, say these.
SET_BY_THE_CHART = {
    *("server.socket", "server.metrics", "server.metrics_socket", "ssd.path"),
    *("peer.listen", "peer.stream", "peer.name"),
}


def main() -> None:
    """Fill `properties.config` of the schema in, and write the other file."""
    chart = Path(sys.argv[1])
    file = chart / "values.schema.json"
    schema = json.loads(file.read_text())
    sections: dict[str, dict[str, object]] = {}
    for name, option in OPTIONS.items():
        section, _, key = name.partition(".")
        if name not in SET_BY_THE_CHART:
            description = f"{option.expected}; default {json.dumps(option.default)}"
            sections.setdefault(section, {})[key] = {
                "type": ["string", "number", "boolean"],
                "description": description,
            }
    schema["properties"]["config"] = {
        "type": "object",
        "additionalProperties": False,
        "properties": {
            section: {"type": "object", "additionalProperties": False, "properties": options}
            for section, options in sections.items()
        },
    }
    file.write_text(json.dumps(schema, indent=2) + "\n")
    known = {
        "defaults": {name: option.default for name, option in OPTIONS.items()},
        "expected": {name: option.expected for name, option in OPTIONS.items()},
        "files": [name for name, option in OPTIONS.items() if option.parse in (secret_file, readable_file)],
    }
    (chart / "files/options.json").write_text(json.dumps(known, indent=2) + "\n")


if __name__ == "__main__":
    main()
