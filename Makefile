# make demo     an image by two workers on this machine, from a fresh clone
# make app      the demo, a page in the browser
# make dist     the wheel, in dist/
# make test     the whole test suite
# make test-all the same for every model, scheduler and option that a guarantee names, and every tab of the page
# make gpu      tests and measurements on the NVIDIA GPUs of this machine, in .venv-gpu; writes docs/figures/gpu.md
# make test-lowest  a part of it with the lowest versions that pyproject.toml allows, in .venv-lowest
# make test-quantised  weights that torchao, GGUF and bitsandbytes have quantised, in .venv-quantised
# make check    lint, types, direction of imports
# make docs     the docs as a site, in build/site
# make diagrams the diagrams of the docs, as SVG
# make figures  the diagrams of the docs, and every measurement that they quote
# make figures-long  the same for what takes hours: large images, half an hour of stream
# make coverage every transformer, UNet and pipeline class of diffusers, split and held against the plain one
# make plans    find the token plans anew that come with the package
# Each makes what it needs in .venv first; the second time that costs nothing.

PYTHON ?= python3
TORCH  ?= 2.13.0
VENV   ?= .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --quiet --disable-pip-version-check
UV     := $(BIN)/uv pip install --quiet --python $(BIN)/python --compile-bytecode
PROMPT ?= a red house on the left and a pine on the right, green hills at sunset

# Bytecode is kept: the hundreds of processes that the tests start would compile every module anew without it.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo app dist browser test test-all gpu test-lowest test-quantised lint format types imports check docs diagrams figures figures-long coverage plans clean
.DELETE_ON_ERROR:

demo: $(VENV)/installed
	$(BIN)/patchpar generate "$(PROMPT)" --devices 2 --output demo.png
	@echo "Look at demo.png. Next: make app, a page in the browser; or $(BIN)/patchpar --help, the command line."

app: $(VENV)/installed-app
	$(BIN)/patchpar app

dist: $(VENV)/installed-dev
	$(BIN)/python -m hatchling build -t wheel -d dist

# The tests look at the page of `make app` in a real browser, where one is there or can be had.
browser: $(VENV)/browser

test: $(VENV)/installed-dev $(VENV)/browser
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder --durations=15

test-all: $(VENV)/installed-dev $(VENV)/browser
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder --durations=15 -m "not gpu"

# Goes on where an earlier run was cut off. Without a GPU it says so, and its exit code is 2.
MINUTES ?= 8

gpu:
	$(PYTHON) -m benchmarks.gpu.battery --minutes $(MINUTES)

# What depends most on versions: what is loaded and refused, seams of every pipeline, guidance, streams, flags.
LOWEST := .venv-lowest
LOWEST_TESTS := tests/safety tests/unit/test_model_folder.py tests/test_tiny.py tests/exact/test_pipelines.py \
  tests/guidance/test_guidance.py tests/pipeline/test_attributes.py tests/pipeline/test_guidance_scales.py \
  tests/stream/test_journal.py tests/stream/test_speech_parts.py tests/cli/test_help.py tests/cli/test_video.py \
  tests/training/test_text_encoder_names.py

test-lowest: $(LOWEST)/installed-lowest
	$(LOWEST)/bin/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder $(LOWEST_TESTS)

# Apart from the other tests: diffusers and transformers import these packages wherever they find them.
QUANTISED := .venv-quantised

test-quantised: $(QUANTISED)/installed-quantised
	$(QUANTISED)/bin/python -m pytest -m "not gpu" tests/weights/test_quantised_libraries.py

check: lint types imports docs

lint: $(VENV)/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(VENV)/installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(VENV)/installed-dev
	$(BIN)/mypy

imports: $(VENV)/installed-dev
	$(BIN)/python -m pytest -q tests/test_architecture.py

# A warning is an error: a dead link, a page that is not in the menu, a name that the reference does not find.
docs: $(VENV)/installed-docs
	$(BIN)/mkdocs build --quiet

diagrams: $(VENV)/installed
	$(BIN)/python -m benchmarks.diagrams

# Takes the better part of an hour, and an otherwise idle machine. Rows of quality with more captions than it generates,
# and those of the transformer, stay as they are: figures-long, and `python -m benchmarks.quality`, which takes days.
figures: $(VENV)/installed-dev diagrams
	$(BIN)/python -m benchmarks.scaling --write docs/figures/scaling.md
	$(BIN)/python -m benchmarks.parity --write docs/figures/parity.md
	$(BIN)/python -m benchmarks.parity.half --write docs/figures/parity-half.md
	$(BIN)/python -m benchmarks.parity.rounding --write docs/figures/rounding.md
	$(BIN)/python -m benchmarks.parity.merged --write docs/figures/merged-attention.md
	$(BIN)/python -m benchmarks.startup --write docs/figures/startup.md
	$(BIN)/python -m benchmarks.transport --write docs/figures/transport.md
	$(BIN)/python -m benchmarks.volumes --write docs/figures/volumes.md
	$(BIN)/python -m benchmarks.tokens --write docs/figures/tokens.md
	$(BIN)/python -m benchmarks.gpu.count --host-time --write docs/figures/gpu-counts.md
	$(BIN)/python -m benchmarks.weights.fits --write docs/figures/fits.md
	$(BIN)/python -m benchmarks.weights --write docs/figures/weights.md
	$(BIN)/python -m benchmarks.weights.laws --seconds 5 --write docs/figures/weights-laws.md
	$(BIN)/python -m benchmarks.weights.slowdown --write docs/figures/weights-slowdown.md
	$(BIN)/python -m benchmarks.forecast --write docs/figures/forecast.md
	$(BIN)/python -m benchmarks.forecast --cpu --write docs/figures/prices.md
	$(BIN)/python -m benchmarks.forecast.ranking --write docs/figures/ranking.md
	$(BIN)/python -m benchmarks.planner_times --write docs/figures/planner-times.md
	$(BIN)/python -m benchmarks.forecast.memory --write docs/figures/memory.md
	$(BIN)/python -m benchmarks.forecast.delayed_links --write docs/figures/delayed-links.md
	$(BIN)/python -m benchmarks.measured_ratio --write docs/figures/measured-ratio.md
	$(BIN)/python -m benchmarks.gpu.predict --write docs/figures/gpu-predict.md
	$(BIN)/python -m benchmarks.serving --real 40 --kills 10 --write docs/figures/serving.md
	$(BIN)/python -m benchmarks.vae --turns 3 --write docs/figures/vae.md
	$(BIN)/python -m benchmarks.stream --write docs/figures/stream.md
	$(BIN)/python -m benchmarks.stream.onset --model assets/face-stream --variant fp16 --write docs/figures/stream-onset.md
	$(BIN)/python -m benchmarks.stream.images --write docs/figures/stream-images.md
	$(BIN)/python -m benchmarks.stream.live --write docs/figures/stream-live.md
	$(BIN)/python -m benchmarks.stream.webrtc --write docs/figures/stream-webrtc.md
	$(BIN)/python -m benchmarks.stream.flicker --write docs/figures/stream-flicker.md
	$(BIN)/python -m benchmarks.stream.kills --write docs/figures/stream-kills.md
	$(BIN)/python -m benchmarks.overlap --latency 1 --latency 5 --latency 20 --load 0.3 --load 0.6 --load 1 --write docs/figures/overlap.md
	$(BIN)/python -m benchmarks.overlap --strategy displaced --strategy pcpp --latency 20 --load 0.3 --load 0.6 --load 1 \
	  --steps 7 --no-rule --write docs/figures/hidden.md
	$(BIN)/python -m benchmarks.quality --quick
	$(BIN)/python -m benchmarks.quality --table --plot
	$(BIN)/python -m benchmarks.quality --model assets/scenes-dit --scheduler flow --steps 20 --table docs/figures/quality-dit.md
	$(BIN)/python -m benchmarks.error_maps --write docs/figures/error-maps.md --images assets/figures/error-maps
	$(BIN)/python -m benchmarks.emulation --captions 2 --size 128 --steps 12 --warmup 1 --ranks --write docs/figures/emulation.md
	$(BIN)/python -m benchmarks.emulation --captions 32 --size 128 --steps 12 --warmup 1 --ranks --write docs/figures/emulation.md \
	  --row "displaced, corrected moments" --row "displaced, as published" --row "partially conditioned .3"
	$(BIN)/python -m benchmarks.emulation --captions 32 --warmup 1 --guidance 3.5 --write docs/figures/emulation.md \
	  --row "fresh edges, all keys, affine" --row "fresh edges, all keys, affine, by owners"
	$(BIN)/python -m benchmarks.sensitivity
	$(BIN)/python -m training.evaluate --sheet assets/figures/samples.png

# Hours, on an otherwise idle machine.
QUALITY_DIT := $(BIN)/python -m benchmarks.quality --model assets/scenes-dit --scheduler flow --size 256x256 --steps 20
figures-long: $(VENV)/installed-dev
	$(QUALITY_DIT) --ranks 4 --strategy naive --strategy frozen --strategy displaced:text=whole,warmup_steps=1 \
	  --strategy pcpp:warmup_steps=1 --strategy fresh-edges:text=whole --strategy fresh-edges:context=pooled \
	  --strategy fresh-edges:context=pooled,pool=2
	$(QUALITY_DIT) --ranks 2 --strategy piped --strategy piped:pieces=8 --strategy piped:correction=extrapolation \
	  --strategy piped:correction=none --strategy piped:correction=none,text=each
	$(BIN)/python -m benchmarks.quality --model assets/scenes-dit --table docs/figures/quality-dit.md
	$(BIN)/python -m benchmarks.highres --generate 2x16x20 --generate 4x4x20 --write docs/figures/highres.md
	$(BIN)/python -m benchmarks.stream.long --devices cpu:2 --write docs/figures/stream-long.md
	$(BIN)/python -m benchmarks.stream.viewers --write docs/figures/stream-viewers.md
	$(BIN)/python -m benchmarks.stream.long --model assets/face-stream --variant fp16 --devices cpu:2 --blocks 300 \
	  --write docs/figures/stream-face.md

# Writes docs/coverage.md; a quarter of an hour on two cores.
coverage: $(VENV)/installed-dev
	$(BIN)/python -m benchmarks.coverage

# Writes patchpar/shard/transformer/plans; minutes on one core.
plans: $(VENV)/installed-dev
	$(BIN)/python -m tests.tokens.ship

clean:
	rm -rf $(VENV) $(LOWEST) $(QUANTISED) dist build .pytest_cache .mypy_cache .ruff_cache

# Without an NVIDIA GPU the CPU build of torch does, at a tenth of the download. It has a version of its own in some
# indexes, an index of its own elsewhere; where neither can be reached (and on macOS) the plain package is a CPU build
# or contains one.
CPU_INDEX := https://download.pytorch.org/whl/cpu

# uv installs several packages at a time and compiles them on all cores, in about a third of pip's seconds. It does not
# read pip's settings (a mirror, a certificate): where it reaches no index, pip installs.
install = $(UV) $(1) || { echo "uv could not install $(1): pip goes on, with its own settings." >&2; $(PIP) install $(1); }

$(VENV)/torch:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "patchpar needs Python 3.10 or newer")'
	@$(PYTHON) -m venv $(VENV)
	@echo "Installing torch and diffusers into $(VENV): a minute or a few, the first time only."
	@$(PIP) install uv || echo "This index has no uv: pip installs alone, which takes longer."
	@if ! nvidia-smi -L 2>/dev/null | grep -q GPU; then \
	  $(PIP) install --no-compile "torch==$(TORCH)+cpu" 2>/dev/null \
	  || $(PIP) install --no-compile --retries 0 --timeout 10 --index-url $(CPU_INDEX) "torch==$(TORCH)" 2>/dev/null \
	  || $(PIP) install --no-compile "torch==$(TORCH)"; \
	fi
	@touch $@

# Of torch the version of the other environment: each older CPU build is hundreds of megabytes more.
$(LOWEST)/installed-lowest: pyproject.toml
	@$(MAKE) --no-print-directory VENV=$(LOWEST) $(LOWEST)/torch
	$(LOWEST)/bin/uv pip install --quiet --python $(LOWEST)/bin/python --resolution lowest-direct \
	  "torch==$$($(LOWEST)/bin/python -c 'import torch; print(torch.__version__)')" --editable ".[lora,video]"
	$(LOWEST)/bin/uv pip install --quiet --python $(LOWEST)/bin/python pytest pytest-timeout pytest-xdist
	$(LOWEST)/bin/uv pip list --python $(LOWEST)/bin/python
	touch $@

$(QUANTISED)/installed-quantised: pyproject.toml
	@$(MAKE) --no-print-directory VENV=$(QUANTISED) $(QUANTISED)/torch
	$(QUANTISED)/bin/python -m pip --quiet --disable-pip-version-check install --editable ".[lora,quantised]" \
	  pytest pytest-timeout pytest-xdist
	touch $@

$(VENV)/installed: $(VENV)/torch pyproject.toml
	@$(call install,--editable .)
	@touch $@

$(VENV)/installed-docs: $(VENV)/torch pyproject.toml
	$(call install,--editable ".[docs]")
	touch $@ $(VENV)/installed

$(VENV)/installed-app: $(VENV)/torch pyproject.toml
	@echo "Installing what the page needs, the first time only."
	@$(call install,--editable ".[app]")
	@touch $@ $(VENV)/installed

# A Chromium that is here, or Debian's, or Playwright's own. Without any the tests in a browser are skipped, and say so.
$(VENV)/browser: $(VENV)/installed-dev
	$(BIN)/python -m tests.app.browser 2>/dev/null \
	|| { test "$$(id -u)" = 0 && apt-get update && apt-get install -y --no-install-recommends chromium; } >/dev/null 2>&1 \
	|| timeout 120 $(BIN)/python -m playwright install --with-deps chromium >/dev/null 2>&1 \
	|| echo "No Chromium here, and none could be installed: the page is not tested in a browser."
	touch $@

$(VENV)/installed-dev: $(VENV)/torch pyproject.toml
	$(call install,--editable ".[dev]")
	touch $@ $(VENV)/installed
