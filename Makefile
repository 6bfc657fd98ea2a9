# Two commands do everything: `make demo` and `make test`.

PYTHON ?= $(firstword $(foreach name,python3.13 python3.12 python3.11 python3,\
	$(shell $(name) -c 'import sys; sys.version_info >= (3, 11) and print("$(name)")' 2>/dev/null)))
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test test-lowest flink-test fuzz lint format bench clean

demo: $(READY)
	$(BIN)/python -m pipelines.build --runner=DirectRunner --config=examples/demo.toml \
		--output=out/demo --num_shards=4 --seq_ordering=random:1
	$(BIN)/python -m pipelines.verify out/demo
	$(BIN)/python -m pipelines.inspect out/demo
	$(BIN)/python examples/read_batch.py out/demo

test: $(READY)
	$(BIN)/pytest

# The oldest dependencies warn about one another, so warnings are no errors here.
test-lowest:
	$(PYTHON) -m venv .venv-lowest
	.venv-lowest/bin/python -m pip install --quiet -e '.[build,test]' -c tests/lowest.txt
	.venv-lowest/bin/pytest -W ignore

# Needs Java, Maven and Go; the programs that it installs stay in CLUSTERS for the next time. The
# tests kill servers in the middle of a job: what fails is tried once more.
CLUSTERS ?= $(HOME)/.cache/seqshard
flink-test: $(READY)
	bash tests/runners/install_clusters.sh $(BIN)/python $(CLUSTERS)
	SEQSHARD_FLINK_HOME=$(CLUSTERS) $(BIN)/pytest -m 'flink or prism' tests/runners || \
		SEQSHARD_FLINK_HOME=$(CLUSTERS) $(BIN)/pytest -m 'flink or prism' --last-failed tests/runners

# Coverage-guided, RUNS inputs per target; what it learns and finds stays in .fuzz.
RUNS ?= 20000
fuzz: $(READY)
	$(BIN)/python -m pip install --quiet atheris
	$(BIN)/python tests/fuzz/fuzz.py --runs=$(RUNS)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(READY)
	$(BIN)/python benchmarks/build.py

clean:
	rm -rf $(VENV) .venv-lowest .fuzz out build *.egg-info

$(READY): setup.py pyproject.toml
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed: make PYTHON=/path/to/python3.11"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -e '.[build,test,test-stores]'
	@touch $@
