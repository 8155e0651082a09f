# Every target sets up .venv by itself; the set-up is skipped while the files that $(STAMP) depends on are unchanged.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.chatmill-installed
DEMO_STAMP := $(VENV)/.chatmill-demo-installed
STARTED := $(shell date +%s)
# Many tests start processes of their own, which would compile every module again where this is set.
export PYTHONDONTWRITEBYTECODE :=
# The benchmarks have an environment of their own, with the tools that Chatmill is compared with.
BENCH_VENV := .venv-bench
BENCH_BIN := $(BENCH_VENV)/bin
BENCH_STAMP := $(BENCH_VENV)/.chatmill-installed
# Compiled by the install.
NATIVE := hatch_build.py $(wildcard src/chatmill/core/native/*.[ch])
# Wheels are built, and made fit for other Linux systems, in an environment of their own.
WHEEL_VENV := .venv-wheels
WHEEL_BIN := $(WHEEL_VENV)/bin
BENCH_PIP := $(BENCH_BIN)/pip install -q --disable-pip-version-check -c constraints.txt -c benchmarks/constraints.txt

.PHONY: demo test test-slow test-gpu test-megatron test-trainers test-azure test-agents lint check docs bench wheels browser clean setup

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt $(NATIVE)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt torch
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt -e '.[dev]'
	$(BIN)/pip install -q --disable-pip-version-check --no-deps --upgrade --target .tokenizers-1 tokenizers==1.0.0rc3
	touch $(STAMP) $(DEMO_STAMP)

# What the demo imports, and no more.
$(DEMO_STAMP): pyproject.toml constraints.txt $(NATIVE)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt torch
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt -e '.[torch,harmony]'
	touch $(DEMO_STAMP)

demo: $(DEMO_STAMP)
	$(BIN)/python examples/demo.py
	@echo "make demo took $$(( $$(date +%s) - $(STARTED) )) s, set-up included"

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

check: lint
	$(BIN)/python -m pytest tests/test_docs.py

docs: setup
	$(BIN)/mkdocs build --strict --quiet
	@echo "dist/docs/index.html"

test: lint
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not slow and not gpu and not trainers and not azure"

# What `make test` does not get to, and its property tests with all their examples.
test-slow: setup
	CHATMILL_TEST_EXAMPLES=all $(BIN)/python -m pytest -m slow
	CHATMILL_TEST_EXAMPLES=all $(BIN)/python -m pytest -m "hypothesis and not slow and not gpu and not trainers and not azure"

# Builds and readers against Azure's emulator, which needs Node.js.
AZURITE := 3.35.0
test-azure: setup
	test -x .azurite/node_modules/.bin/azurite-blob || npm install --silent --no-audit --no-fund --prefix .azurite azurite@$(AZURITE)
	$(BIN)/python -m pytest -m azure tests/files

test-gpu: setup
	$(BIN)/python -m pytest -m gpu

# The dataset class and the training example with another megatron-core than the installed one, newer than our Python or not.
MEGATRON ?= 0.19.2
test-megatron: setup
	$(BIN)/pip install -q --no-deps --ignore-requires-python --target .megatron-$(MEGATRON) megatron-core==$(MEGATRON) triton
	PYTHONPATH=$(CURDIR)/.megatron-$(MEGATRON) $(BIN)/python -m pytest tests/megatron

# Exports, read by the trainers' own classes, and trained on where a CPU can. They are for other versions of Python and of each
# other's packages: each is in a folder of its own, with the few packages that its reader imports. One whose pins have changed is
# installed again.
# So are ms-swift and NeMo Automodel, inside which adapters run, and the packages that adapters of rollouts are for.
TRAINERS := axolotl llamafactory megatron-bridge ms-swift nemo-automodel olmo-core skyrl levanter torchtitan
OWN_PACKAGES := renderers tinker verl
PINS := $(TRAINERS:%=tests/export/own_readers/%.txt) $(OWN_PACKAGES:%=tests/rollouts/own_packages/%.txt)
test-trainers: setup
	for pins in $(PINS); do \
		name=$$(basename $$pins .txt); \
		cmp -s $$pins .trainers/$$name.txt && continue; \
		rm -rf .trainers/$$name; \
		$(BIN)/pip install -q --no-deps --ignore-requires-python --only-binary :all: \
			--target .trainers/$$name -r $$pins || exit 1; \
		cp $$pins .trainers/$$name.txt; \
	done
	$(BIN)/python -m pytest -m trainers tests/export tests/images/test_training.py tests/rollouts tests/trainers

# Files that agents' own packages write, and other readers of such files, anew: they want a newer Python than we do. harbor is
# installed without what it depends on, of which its converters need two small packages.
AGENTS_PYTHON ?= python3.12
test-agents: setup
	test -x .agents/venv/bin/python || $(AGENTS_PYTHON) -m venv .agents/venv
	.agents/venv/bin/pip install -q --disable-pip-version-check -r tools/agent_files/requirements.txt
	.agents/venv/bin/pip install -q --disable-pip-version-check --no-deps harbor==0.25.0
	rm -rf .agents/data && cp -r tests/data/agents .agents/data && rm -r .agents/data/openhands
	.agents/venv/bin/python tools/agent_files/openhands_run.py .agents/data
	.agents/venv/bin/python tools/agent_files/litellm_payloads.py .agents/data
	.agents/venv/bin/python tools/agent_files/other_readers.py .agents/data
	CHATMILL_AGENT_DATA=$(CURDIR)/.agents/data $(BIN)/python -m pytest tests/read -k agents

$(BENCH_STAMP): pyproject.toml constraints.txt $(NATIVE) benchmarks/constraints.txt benchmarks/requirements.txt
	test -x $(BENCH_BIN)/python || $(PYTHON) -m venv $(BENCH_VENV)
	$(BENCH_PIP) torch
	$(BENCH_PIP) -r benchmarks/requirements.txt -e .
	$(BENCH_BIN)/pip install -q --disable-pip-version-check --no-deps --upgrade --target .tokenizers-1 tokenizers==1.0.0rc3
	touch $(BENCH_STAMP)

# BENCH_OPTIONS=--quick sees in three minutes that everything still runs.
bench: $(BENCH_STAMP)
	$(BENCH_BIN)/python -m benchmarks.run $(BENCH_OPTIONS)

# The source distribution, and wheels for Linux and macOS, x86-64 and Arm, in dist/wheels: Zig compiles for all of them.
# The one for this machine is tried with Python 3.11 to 3.13, as far as uv finds or fetches them, without a compiler and without torch.
TARGETS := x86_64-linux-gnu.2.17 aarch64-linux-gnu.2.17 x86_64-macos.11.0 aarch64-macos.11.0
wheels:
	test -x $(WHEEL_BIN)/python || $(PYTHON) -m venv $(WHEEL_VENV)
	$(WHEEL_BIN)/pip install -q --disable-pip-version-check build hatchling 'ziglang>=0.14,<0.16' uv
	rm -rf dist/wheels
	$(WHEEL_BIN)/pyproject-build --sdist --no-isolation --outdir dist/wheels
	for target in $(TARGETS); do \
		CHATMILL_TARGET=$$target $(WHEEL_BIN)/pyproject-build --wheel --no-isolation --outdir dist/wheels || exit 1; done
	$(WHEEL_BIN)/python -m tests.try_wheels dist/wheels

browser:
	command -v chromium >/dev/null || (apt-get update -qq && apt-get install -y -qq chromium)

clean:
	rm -rf $(VENV) $(BENCH_VENV) $(WHEEL_VENV) .megatron-* .trainers .azurite .agents .tokenizers-1 .pytest_cache .mypy_cache .ruff_cache .hypothesis demo_out
