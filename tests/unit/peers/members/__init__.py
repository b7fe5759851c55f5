"""Tests of the peers: keys, members, the control plane, and hostile nodes."""
