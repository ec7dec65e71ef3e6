# Two commands: `make demo` trains the example, `make test` runs the tests. Each creates the environment first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PROJECT := examples/mnist
OUTPUT := output/MNIST

.PHONY: help demo test test-fast test-all torture check format bench bench-table gpu docs site release setup clean

help:
	@echo "make demo    train the MNIST project on handwritten digits (about a minute; creates .venv first)"
	@echo "make test    run the tests (about twelve minutes on two cores)"
	@echo "make test-fast  run the tests that neither start programs nor compile (a minute and a half)"
	@echo "make test-all   run all tests, with the products of cases that make test samples (half an hour); the repository's workflow runs it"
	@echo "make torture kill training runs more than 500 times, at every point of a save, and compare the results; all layouts of checkpoints and failures (minutes)"
	@echo "make check   format, lint, strict types, import floors, the documentation site"
	@echo "make bench   time the trainers against a plain PyTorch loop (about four minutes)"
	@echo "make bench-table  run all benchmarks and update the table of docs/performance.md (about half an hour)"
	@echo "make gpu     measure everything that needs an NVIDIA GPU (under ten minutes), and write bench-out/gpu.md"
	@echo "make site    build the documentation site with the API reference into output/site"
	@echo "make release  build the package, check it, and try it where it is installed, with each torch of TORCH=\"2.11.0 2.14.1\""
	@echo "make docs    update the images of the documentation from a run of the demo"
	@echo "make setup   create the complete environment in .venv"
	@echo "make clean   remove .venv and the output of the demo"

$(VENV)/bin/python:
	@echo "== Creating the environment in $(VENV)"
	@$(PYTHON) -c 'import sys; sys.exit("trainwright needs Python 3.11 or newer, this is " + sys.version.split()[0]) if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv $(VENV)

# Stamps: installed once, and again when the requirements change.
$(VENV)/.demo: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "== Installing trainwright for the demo (torch is large: minutes, on a slow network more)"
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e '.[examples]'
	@touch $@

$(VENV)/.all: pyproject.toml constraints.txt tests/environment/cpu_torchvision.py | $(VENV)/bin/python
	@echo "== Installing trainwright with its test and check tools (about 200 packages: minutes, on a slow network more)"
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e '.[examples,test,check]'
	$(BIN)/python tests/environment/cpu_torchvision.py
	@touch $@ $(VENV)/.demo

setup: $(VENV)/.all

demo: $(VENV)/.demo
	@echo "== Preparing the digits"
	$(BIN)/python $(PROJECT)/prepare_digits.py
	@echo "== Training: trainwright train $(PROJECT)/configs/config.py"
	$(BIN)/trainwright train $(PROJECT)/configs/config.py train.output_dir=$(OUTPUT)
	@echo "== Drawing the curves"
	$(BIN)/python $(PROJECT)/plot_curves.py $(OUTPUT)
	@echo "== Done. $(OUTPUT) holds:"; ls $(OUTPUT)

# Two processes; a file is in one of them, so that its runs are made once; the files that take longest begin.
# Compiled tests are kept for the next process, even if PYTHONDONTWRITEBYTECODE is set: rewriting them takes seconds.
PYTEST := PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

test: $(VENV)/.all
	@echo "== Running the tests"
	SHORT_EXIT=1 $(PYTEST) -m "not exhaustive"

test-fast: $(VENV)/.all
	@echo "== Running the quick tests"
	$(PYTEST) -m "not (exhaustive or slow or subprocess or compile)"

test-all: $(VENV)/.all
	@echo "== Running all tests"
	$(PYTEST)

torture: $(VENV)/.all
	@echo "== Killing runs"
	$(BIN)/python -m tests.torture.run --kills 500 --every-operation
	TORTURE=1 $(PYTEST) tests/checkpoint/test_sharded_saving.py tests/benchmarks/test_benchmarks.py \
		tests/checkpoint/test_mirror_kills.py tests/engine/test_mirror.py \
		$(addprefix tests/distributed/test_,sharded_checkpoints.py faults.py stops.py hosts.py)

check: $(VENV)/.all
	@echo "== Format"; $(BIN)/ruff format --check .
	@echo "== Lint"; $(BIN)/ruff check .
	@echo "== Types"; $(BIN)/mypy
	@echo "== Floors"; $(BIN)/python -m pytest -q tests/house
	@echo "== Documentation site"; $(MAKE) -s site

# A warning is an error: a broken link, or a name in a docstring that leads nowhere.
site: $(VENV)/.all
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

format: $(VENV)/.all
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(VENV)/.all
	$(BIN)/python -m benchmarks.step --case quick

CASES := tiny own_step features accumulation bf16 tensors columns graph_columns gpt ranks
bench-table: $(VENV)/.all
	for case in $(CASES); do $(BIN)/python -m benchmarks.step --case $$case --json bench-out/step_$$case.json || exit 1; done
	for name in start checkpoint resume; do \
		$(BIN)/python -m benchmarks.$$name --json bench-out/$$name.json || exit 1; done
	$(BIN)/python -m benchmarks.table bench-out/*.json --into docs/performance.md

# Without a GPU it says so and ends with an error.
gpu: $(VENV)/.all
	$(BIN)/python -m benchmarks.gpu_table --into bench-out/gpu.md

$(VENV)/.release: $(VENV)/.all
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[release]'
	@touch $@

# TORCH: versions to try, by default that of constraints.txt. Nothing is published: a tag does it (release.yml).
release: $(VENV)/.release
	$(BIN)/python tools/release.py $(addprefix --torch ,$(TORCH))

docs: demo
	cp $(OUTPUT)/curves.png docs/images/mnist_curves.png

clean:
	rm -rf $(VENV) output examples/mnist/data
