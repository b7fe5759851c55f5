"""Nodes on hosts of their own: real daemons in network namespaces, bad networks between them, hostile peers."""
