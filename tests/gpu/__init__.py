"""`make test-gpu`: what kvpool does on a real GPU, in parts with deadlines, rehearsed on the emulated driver."""
