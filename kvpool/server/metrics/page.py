"""Page of metrics: writes `docs/metrics.md` from the table of metrics: `python -m kvpool.server.metrics.page >
docs/metrics.md`.

Pure; a test compares the page with what this writes.
"""

import sys

from kvpool.server.metrics.definitions import PROCESS_METRICS, SECTIONS, sample_names
from kvpool.server.metrics.metric import Metric

HEAD = """\
# Metrics

What `kvpoold` exports when `server.metrics` names a loopback address, or `server.metrics_socket` a unix socket (see
[configs/kvpool.toml](../configs/kvpool.toml)):

| path | answers |
|---|---|
| `/metrics` | every metric below, as Prometheus text or, where the request's `Accept` asks for it, OpenMetrics |
| `/healthz` | 200 while the daemon can do its work, else 503; JSON with the problems, one line each |
| `/readyz` | 200 while requests are served, else 503: before the socket is there, and while draining |

A scrape is one snapshot of one moment, rendered at most once a second. Where the control thread does not answer
within 2 s, all three answer 503. A connection that has not asked within a second is cut; 50 are accepted in a second.
The unix socket has the rights of `server.socket_mode`:

```
curl --unix-socket /run/kvpool/metrics.sock http://kvpool/healthz
```

```yaml
scrape_configs:
  - job_name: kvpool
    static_configs: [{ targets: ["127.0.0.1:9469"] }]
```

[configs/grafana-dashboard.json](../configs/grafana-dashboard.json) shows them, with a row for each part of a node, and
[configs/kvpool-alerts.yml](../configs/kvpool-alerts.yml) has alert rules for them. Names never change their meaning.

Lookups and loads happen inside engines, without a request unless a shared store is asked
([tiers.md](tiers.md#finding-chunks)). Their clients report them at most once a second, and when they close. What a
client did in the last second before it was killed is missing. Reports are another process's word: what cannot be is
cut and counted as such, and counts for the reporting connection's own model. At most 64 models are counted
separately; later ones count as `other`.

Each rank's lookups and loads count with its own bytes and its part of the tokens: all ranks together have each token
once. A scheduler's lookup counts for all ranks. Of ranks that have parts of the same chunks (head groups), the one
with their first heads and layers counts for all. Sparse sequences report at the first step after each, and when they
close.
"""

TAIL = f"""\

## The process

The Prometheus library adds its own for the process, among them `{"`, `".join(PROCESS_METRICS)}`. Resident memory includes the
pages of the arena that the daemon itself has touched.

<!-- Written by python -m kvpool.server.metrics.page; make docs renews it. -->
"""


def render() -> str:
    """The whole page."""
    parts = [HEAD]
    for title, metrics in SECTIONS.items():
        parts.append(f"\n## {title}\n\n")
        parts.extend(_line_of(metric) for metric in metrics)
    return "".join([*parts, TAIL])


def _line_of(metric: Metric) -> str:
    name = metric.name if len(sample_names(metric)) > 1 else sample_names(metric)[0]
    labels = f"{{{','.join(metric.labels)}}}" if metric.labels else ""
    kind = f"{metric.kind.value}, {metric.unit}" if metric.unit else metric.kind.value
    return f"- `{name}{labels}`, {kind}: {metric.help}\n"


def main() -> None:
    """Writes the page on standard output."""
    sys.stdout.write(render())


if __name__ == "__main__":
    main()
