# `make demo` captures a small model, `make test` runs every check, `make help` lists the targets.
# Needs make and Python 3.10 or newer. If Go or a C compiler is missing, pip installs one. JOBS is how
# many files of Python tests run at once.

PYTHON ?= python3
VENV ?= .venv
PREFIX ?= /usr/local
DESTDIR ?=
FUZZTIME ?= 20s
JOBS ?= 2
BASE ?= HEAD
STATICCHECK := honnef.co/go/tools/cmd/staticcheck@v0.8.2

PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check
LIB := python/llm_instrumentation/_native/libstrap.so
HOOK := python/llm_instrumentation/_native/hook.so
PROBE := python/llm_instrumentation/_native/strap-probe
# The files that are built into the Python package. strap-probe is for Linux only.
NATIVE := $(LIB) $(HOOK) $(if $(filter Linux,$(shell uname -s)),$(PROBE))
VERSION := $(shell sed -n 's/^__version__ = "\(.*\)"$$/\1/p' python/llm_instrumentation/_version.py)
LIB_SOURCES := $(shell find bpf libstrap c_include -type f ! -name '*_test.go' ! -path '*/testdata/*') \
	go.mod go.sum python/llm_instrumentation/_version.py
PYTEST := $(PY) -m pytest

# Sets GO, CC, CXX and the variables that go with them, for the rest of a recipe line.
TOOLS = tools=$$($(PY) packaging/toolchain.py env) && eval "$$tools"

# The tests start hundreds of processes. Without compiled modules each takes 12 seconds more for torch.
unexport PYTHONDONTWRITEBYTECODE

.NOTPARALLEL:
.PHONY: help demo examples sae circuit llama-cpp vllm check test test-long test-go test-abi test-python test-faults fuzz bench \
	matrix generate lib install uninstall wheel sdist fmt lint docs clean

help: ## List the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' Makefile | expand -t 14

demo: $(VENV)/.examples ## Capture a small model, with nothing but Python installed
	HF_HUB_OFFLINE=1 $(PY) examples/basic_usage.py

examples: $(VENV)/.traced-examples ## Run examples: resume, compare dtypes, a broken training, a slow disk, a memory trace
	for name in tokens_and_resume compare_dtypes flight_training slow_disk memory_trace; do \
		HF_HUB_OFFLINE=1 $(PY) examples/$$name.py || exit 1; \
	done

sae: $(VENV)/.sae ## Train a sparse autoencoder on a small language model's capture
	HF_HUB_OFFLINE=1 $(PY) examples/sparse_autoencoder.py

circuit: $(VENV)/.circuits ## Train two small models, and find their circuits
	HF_HUB_OFFLINE=1 $(PY) examples/induction_heads.py
	HF_HUB_OFFLINE=1 $(PY) examples/indirect_object.py

llama-cpp: $(VENV)/.examples $(LIB) ## Capture a model in llama.cpp, and compare it with transformers
	$(TOOLS) && HF_HUB_OFFLINE=1 $(PY) examples/llama_cpp/side_by_side.py

vllm: $(VENV)/.toolchain $(LIB) $(HOOK) ## Test the captures of vLLM, in an environment with it
	python=$$($(PY) packaging/vllm_environment.py) && \
		"$$python" -m pytest -p no:cacheprovider tests/engines/test_vllm.py

check: lint $(NATIVE) ## Lint, and the tests nearest to what differs from the commit BASE
	$(TOOLS) && "$$GO" test -short ./...
	tests=$$($(PY) scripts/nearest_tests.py --base $(BASE)) && { [ -z "$$tests" ] || \
		{ $(TOOLS) && HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(PYTEST) $$tests -n $(JOBS) --dist loadfile; }; }

# Lint comes first, because its cache is used by a test too.
test: lint docs test-go test-abi test-python test-faults ## Run every check, but for those of test-long

test-long: $(VENV)/.dev $(NATIVE) vllm ## What takes minutes or downloads: before a release
	-$(PY) packaging/versitygw.py
	$(TOOLS) && $(PYTEST) tests -m "slow and not performance"
	$(TOOLS) && OMP_NUM_THREADS=1 $(PYTEST) tests/performance/test_flight_memory.py -m slow
	$(TOOLS) && HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(PYTEST) tests -m property --hypothesis-profile long --timeout 0 -n $(JOBS)

# The race detector slows pure computation ten times. So -short makes the inputs of such tests few and small
# for it, and the first run has all of them. All pools, pipelines and workers run in both.
test-go: $(VENV)/.toolchain ## Go: vet, all tests, and again under the race detector
	$(TOOLS) && "$$GO" vet ./... && "$$GO" test -vet=off ./... && "$$GO" test -vet=off -race -short ./...

test-abi: $(VENV)/.dev $(LIB) ## C and C++ programs against the library
	$(TOOLS) && $(PYTEST) tests/abi -n $(JOBS) --dist worksteal

# Each process has a core to itself. More threads slow the tests: 282 of them took 185 s, not 140.
test-python: $(VENV)/.dev $(NATIVE) ## Python, packaging and import rules
	-$(PY) packaging/versitygw.py # tests of object storage skip without it
	$(TOOLS) && HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(PYTEST) tests --ignore=tests/abi --ignore=tests/faults \
		-n $(JOBS) --dist loadfile --no-loadscope-reorder --durations=25

# Most of these tests wait for a disk or for a child, so there are more of them than cores.
test-faults: $(VENV)/.dev $(NATIVE) ## Full disks, killed processes, torn files
	-$(PY) packaging/versitygw.py
	$(TOOLS) && $(PYTEST) tests/faults -n 4 --dist worksteal --durations=10

fuzz: $(VENV)/.toolchain ## Run every Go fuzzer for FUZZTIME each, and tell its rate
	@$(TOOLS) && FUZZTIME=$(FUZZTIME) scripts/fuzz.sh

matrix: $(VENV)/.dev ## Test the oldest and newest releases of Python and torch; downloads 5 GB a row
	$(TOOLS) && $(PY) packaging/matrix.py

bench: $(VENV)/.dev $(NATIVE) ## Measure: Go benchmarks, then benchmarks/ (quiet machine)
	$(TOOLS) && "$$GO" test -run '^$$' -bench . -benchmem ./...
	@$(TOOLS) && PYTHON=$(PY) scripts/run_benchmarks.sh --peers

generate: $(VENV)/.toolchain ## Compile bpf/ again (clang-14, llvm-14, libbpf-dev), write notices and bill of materials
	$(TOOLS) && "$$GO" generate ./bpf && $(PY) packaging/notices.py && $(PY) packaging/sbom.py

lib: $(NATIVE) ## Build libstrap.so, hook.so and strap-probe into the Python package

install: $(NATIVE) ## Install library, header, strap-probe and the like into DESTDIR/PREFIX
	install -d '$(DESTDIR)$(PREFIX)/include' '$(DESTDIR)$(PREFIX)/lib/pkgconfig' \
		'$(DESTDIR)$(PREFIX)/lib/cmake/strap'
	install -m 755 $(LIB) '$(DESTDIR)$(PREFIX)/lib/libstrap.so.1'
	ln -sf libstrap.so.1 '$(DESTDIR)$(PREFIX)/lib/libstrap.so'
	install -D -m 644 -t '$(DESTDIR)$(PREFIX)/share/doc/strap' LICENSE THIRD_PARTY_NOTICES
	install -m 644 c_include/strap.h '$(DESTDIR)$(PREFIX)/include/strap.h'
	sed -e 's|@PREFIX@|$(PREFIX)|' -e 's|@VERSION@|$(VERSION)|' packaging/strap.pc.in \
		>'$(DESTDIR)$(PREFIX)/lib/pkgconfig/strap.pc'
	sed 's|@VERSION@|$(VERSION)|' packaging/strapConfig.cmake.in \
		>'$(DESTDIR)$(PREFIX)/lib/cmake/strap/strapConfig.cmake'
	sed 's|@VERSION@|$(VERSION)|' packaging/strapConfigVersion.cmake.in \
		>'$(DESTDIR)$(PREFIX)/lib/cmake/strap/strapConfigVersion.cmake'
	install -D -m 644 -t '$(DESTDIR)$(PREFIX)/share/strap' packaging/valgrind.supp
	$(if $(filter $(PROBE),$(NATIVE)),install -D -m 755 $(PROBE) '$(DESTDIR)$(PREFIX)/bin/strap-probe')

uninstall: ## Remove what install put into DESTDIR/PREFIX
	cd '$(DESTDIR)$(PREFIX)' && rm -f bin/strap-probe include/strap.h lib/libstrap.so lib/libstrap.so.1 \
		lib/pkgconfig/strap.pc && rm -rf lib/cmake/strap share/doc/strap share/strap

wheel: $(VENV)/.release ## Build a manylinux2014 wheel into dist/
	tools=$$($(PY) packaging/toolchain.py env --portable) && eval "$$tools" && \
		$(PY) -m build --wheel --outdir dist .
	@for wheel in dist/*-$(VERSION)-py3-none-manylinux*.whl; do \
		$(PY) -m auditwheel show "$$wheel" | tr '\n' ' ' | grep -o '"manylinux_2_17_[a-z0-9_]*"' || \
		{ echo "$$wheel does not keep its manylinux2014 tag"; exit 1; }; \
	done

sdist: $(VENV)/.release ## Build a source distribution into dist/
	$(PY) -m build --sdist --outdir dist .

fmt: $(VENV)/.dev ## Format Go and Python
	$(TOOLS) && "$$("$$GO" env GOROOT)/bin/gofmt" -w bpf libstrap
	$(PY) -m ruff check --fix-only --quiet .
	$(PY) -m ruff format .

lint: $(VENV)/.dev ## Formatting, static analysis and types
	@$(TOOLS) && unformatted=$$("$$("$$GO" env GOROOT)/bin/gofmt" -l bpf libstrap) && \
		[ -z "$$unformatted" ] || { echo "run make fmt:" $$unformatted; exit 1; }
	$(TOOLS) && "$$GO" mod tidy -diff && $(PY) packaging/notices.py --check && \
		$(PY) packaging/sbom.py --check && "$$GO" run $(STATICCHECK) ./...
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(PY) scripts/api_page.py --check

docs: $(VENV)/.dev ## Build the site of docs/ into build/site; a broken link fails
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict

clean: ## Remove what was built, and the captures and results of examples; .venv stays
	rm -rf build dist captures results $(NATIVE) .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find python tests examples benchmarks -name __pycache__ -prune -exec rm -rf {} +

$(LIB): $(LIB_SOURCES) | $(VENV)/.toolchain
	$(TOOLS) && libstrap/build.sh $@

$(HOOK): $(wildcard libstrap/hook/*) libstrap/build-hook.sh c_include/strap.h | $(VENV)/.toolchain
	$(TOOLS) && libstrap/build-hook.sh $@

$(PROBE): $(LIB_SOURCES) | $(VENV)/.toolchain
	$(TOOLS) && libstrap/build-probe.sh $@

# Debian's Python may lack ensurepip (package python3-venv). Then its pip installs pip into the
# environment.
$(PY):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
		{ echo "make: needs Python 3.10 or newer, set PYTHON"; exit 1; }
	@if $(PYTHON) -c 'import ensurepip' 2>/dev/null; then \
		$(PYTHON) -m venv $(VENV); \
	elif $(PYTHON) -m pip --version >/dev/null 2>&1; then \
		$(PYTHON) -m venv --without-pip $(VENV) && \
		{ $(PYTHON) -m pip --python $(PY) install --quiet pip || { rm -rf $(VENV); exit 1; }; }; \
	else \
		echo "make: $(PYTHON) has neither ensurepip nor pip: install python3-venv"; exit 1; \
	fi

$(VENV)/.toolchain: packaging/toolchain.py go.mod | $(PY)
	@missing=$$($(PY) packaging/toolchain.py requirements) && \
		{ [ -z "$$missing" ] || $(PIP) install --quiet $$missing; }
	@touch $@

$(VENV)/.examples: pyproject.toml hatch_build.py $(VENV)/.toolchain
	$(TOOLS) && $(PIP) install --quiet -e '.[examples]'
	@touch $@

$(VENV)/.traced-examples: pyproject.toml hatch_build.py $(VENV)/.toolchain
	$(TOOLS) && $(PIP) install --quiet -e '.[examples,mrm]'
	@touch $@

$(VENV)/.sae: pyproject.toml hatch_build.py $(VENV)/.toolchain
	$(TOOLS) && $(PIP) install --quiet -e '.[report,sae]'
	@touch $@

$(VENV)/.circuits: pyproject.toml hatch_build.py $(VENV)/.toolchain
	$(TOOLS) && $(PIP) install --quiet -e '.[circuits,examples,report]'
	@touch $@

# uv installs many packages faster than pip. Where it cannot, as with an index in pip's settings, pip does.
$(VENV)/.dev: pyproject.toml hatch_build.py $(VENV)/.toolchain
	$(TOOLS) && { $(PIP) install --quiet 'uv>=0.9' && \
		$(VENV)/bin/uv pip install --quiet --python $(PY) -e '.[dev]' || \
		$(PIP) install --quiet -e '.[dev]'; }
	@touch $@

$(VENV)/.release: $(VENV)/.toolchain
	$(PIP) install --quiet build auditwheel \
		$$($(PY) packaging/toolchain.py requirements --portable)
	@touch $@
