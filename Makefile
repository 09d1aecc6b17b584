# On a machine with Python 3.11 or later, pip and make, every target works as it stands.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
CORE := $(VENV)/.core
# Every extra but wandb and mlflow, which bring many packages and which no test imports.
EXTRAS := dev,peers,site,hub,fast,datasets,parquet,remote,s3,video,audio,text,tensorboard,onnx,openvino,serve,faiss

.DEFAULT_GOAL := help
.PHONY: help demo install hooks test test-fast test-cluster check format bench docs site notebooks clean

help: ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

$(CORE): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	PIP_CONSTRAINT=$(CURDIR)/constraints.txt $(BIN)/python -m pip install --quiet --editable .
	touch $@

$(STAMP): $(CORE)
	PIP_CONSTRAINT=$(CURDIR)/constraints.txt $(BIN)/python -m pip install --quiet --editable '.[$(EXTRAS)]'
	touch $@

demo: $(CORE) ## install, check data, train a small ViT on handwritten digits, and write its report
	$(BIN)/vitrail check digits
	$(BIN)/vitrail train digits

install: $(STAMP) ## make .venv with everything pinned

hooks: $(STAMP) ## check format, lint and message at every commit of this clone
	$(BIN)/pre-commit install

test: $(STAMP) ## all tests
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n auto --maxprocesses 4

# Tests that start processes, train, export or serve.
WHOLE_RUNS := training deploy serve e2e hostile parity cluster
test-fast: $(STAMP) ## unit tests, for every commit
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n auto --maxprocesses 4 -m "not slow" \
	  $(WHOLE_RUNS:%=--ignore tests/%) --ignore tests/test_packaging.py --ignore tests/test_examples.py

test-cluster: $(STAMP) ## a SLURM of its own and hosts in network namespaces: as root, with slurm-wlm, munge and iproute2
	VITRAIL_TEST_CLUSTER=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q tests/cluster -rA

check: $(STAMP) ## format, lint, types, imports between floors, generated pages
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright
	$(BIN)/lint-imports
	$(BIN)/python docs/annotate.py --check

format: $(STAMP) ## format and fix what can be fixed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(STAMP) ## measure against the peers, interleaved; more than eight hours on two cores
	$(BIN)/python benchmarks/startup.py
	$(BIN)/python benchmarks/models.py
	$(BIN)/python benchmarks/video.py
	$(BIN)/python benchmarks/video.py --files
	$(BIN)/python benchmarks/resolution.py
	$(BIN)/python benchmarks/small_step.py
	$(BIN)/python benchmarks/weights.py
	$(BIN)/python benchmarks/listing.py
	$(BIN)/python benchmarks/remote.py
	$(BIN)/python benchmarks/check.py
	$(BIN)/python benchmarks/preparing.py
	$(BIN)/python benchmarks/preparing_masks.py
	$(BIN)/python benchmarks/training.py
	$(BIN)/python benchmarks/time_to_accuracy.py
	$(BIN)/python benchmarks/cifar10_minutes.py
	$(BIN)/python benchmarks/small_families.py
	$(BIN)/python benchmarks/moving_digits.py
	$(BIN)/python benchmarks/moving_digits.py --labels 10
	$(BIN)/python benchmarks/short_finetune.py
	$(BIN)/python benchmarks/zero_shot.py
	$(BIN)/python benchmarks/one_encoder.py
	$(BIN)/python benchmarks/label_errors.py
	$(BIN)/python benchmarks/segmentation.py
	$(BIN)/python benchmarks/segmentation.py --memory
	$(BIN)/python benchmarks/segmentation.py --train
	$(BIN)/python benchmarks/fewer_tokens.py
	$(BIN)/python benchmarks/pretraining.py
	$(BIN)/python benchmarks/inspect.py
	$(BIN)/python benchmarks/shipping.py
	$(BIN)/python benchmarks/runtimes.py
	$(BIN)/python benchmarks/text_search.py
	$(BIN)/python benchmarks/embedding_map.py
	$(BIN)/python benchmarks/uploads.py
	$(BIN)/python benchmarks/attack.py
	$(BIN)/python benchmarks/chart.py

docs: $(STAMP) ## write the pages that are generated from the source
	$(BIN)/python docs/annotate.py

site: $(STAMP) ## build/site: the documentation as a site, to open from the disk or to serve; broken links fail
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict # --quiet would let warnings pass

notebooks: $(STAMP) ## run the notebooks and save their outputs
	$(BIN)/python examples/notebooks/run.py

clean: ## remove what make made
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .hypothesis .import_linter_cache
