"""The native module, for copies in the memory of a device."""
