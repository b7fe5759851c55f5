"""The files of dist/, tried on bare machines: `make test-packages`."""
