"""The command `kvpoold`."""
