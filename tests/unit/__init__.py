"""One module at a time; mirrors the packages."""
