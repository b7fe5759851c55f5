"""Writes the daemon's options into the schema of a chart's values, the file that the first argument names.

A misspelt option, or one that the chart sets by itself, is then refused by Helm and not by the daemons of every node.
"""

import json
import sys
from pathlib import Path

from kvpool.config.config import OPTIONS

# Values of the chart, or facts of a pod, say these.
SET_BY_THE_CHART = {
    *("server.socket", "server.metrics", "server.metrics_socket", "ssd.path"),
    *("peer.listen", "peer.stream", "peer.name"),
}


def main() -> None:
    """Fill `properties.config` in."""
    file = Path(sys.argv[1])
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


if __name__ == "__main__":
    main()
