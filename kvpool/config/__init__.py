"""The daemon's configuration: its file, its options, what each may be."""
