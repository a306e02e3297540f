# On a bare machine with Python (3.10 or later) and make, each target does all of its own set-up in .venv.
PYTHON ?= python3
BIN := .venv/bin
OUT := fastloop-runs/demo
OLDEST := .venv/oldest
HUGGING_FACE := .venv/hugging-face

# Where this is set, each of the many processes that tests start would compile all it imports anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test check oldest hugging-face readme clean

# A busy machine may leave the comparison open: exit code 4, and the load is named.
demo: .venv/.demo
	$(BIN)/fastloop plan resnet50 recipe.size=tiny --config safe
	$(BIN)/fastloop exec --out $(OUT)/run --force -- $(BIN)/python benchmarks/demo_train.py
	$(BIN)/fastloop ab --script benchmarks/demo_train.py --vs cache --runs 3 --steps 60 --out $(OUT)/ab --force \
		|| test $$? -eq 4
	@echo "The pictures: $(OUT)/run/report.html (why it is slow) and $(OUT)/ab/report.html (what a rung gains)"

# What fails beside other tests runs once more by itself; only what fails twice fails a target.
run_tests = $(1) -n $(2) --dist worksteal || { test $$? -eq 1 && $(1) --last-failed --last-failed-no-failures none; }

# Three processes for two cores: tests often wait for what they started.
# With large pages for what malloc gives out, forks of these large processes cost half as much.
test: export GLIBC_TUNABLES = glibc.malloc.hugetlb=1
test: .venv/.dev
	$(call run_tests,$(BIN)/python -m pytest,3)

check: .venv/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

# The short suite on the oldest supported lightning and omegaconf, laid over the same environment.
oldest: .venv/.oldest
	$(call run_tests,PYTHONPATH=$(OLDEST) $(BIN)/python -m pytest -m short -o cache_dir=$(OLDEST)/.pytest_cache,2)

# Tests on models of Hugging Face, whose package is laid over the environment: where it is installed, torchmetrics imports
# it, and every process would start seconds later.
hugging-face: .venv/.hugging-face
	PYTHONPATH=$(HUGGING_FACE) $(BIN)/python -m pytest -p no:cacheprovider -k hugging \
		tests/feeds/attention/test_candidates.py tests/evidence/work/test_compiled_work.py

readme: .venv/.dev
	$(BIN)/python -m tests.test_readme

.venv/.demo: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[recipes]"
	touch $@

.venv/.dev: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[dev]"
	touch $@

.venv/.oldest: .venv/.dev
	rm -rf $(OLDEST)
	$(BIN)/python -m pip install --quiet --no-deps --target $(OLDEST) \
		lightning==2.5.0.post0 omegaconf==2.3.0 antlr4-python3-runtime==4.9.3
	touch $@

.venv/.hugging-face: .venv/.dev
	rm -rf $(HUGGING_FACE)
	$(BIN)/python -m pip install --quiet --no-deps --target $(HUGGING_FACE) transformers==4.57.6 "huggingface_hub<1" \
		"tokenizers<0.23" safetensors regex requests charset_normalizer idna urllib3 certifi
	touch $@

clean:
	rm -rf .venv dist build
