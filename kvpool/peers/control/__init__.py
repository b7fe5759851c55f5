"""The control plane between nodes: its records, their wire form, the sockets."""
