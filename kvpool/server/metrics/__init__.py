"""The daemon's metrics: measurements, definitions, Prometheus over HTTP."""
