# A thin front for CMake, CTest and scripts/. `make help` lists what there is.

JOBS         ?= $(shell nproc 2>/dev/null || echo 2)
PREFIX       ?= /usr/local
FUZZ_SECONDS ?= 10
SAN          ?=
export JOBS FUZZ_SECONDS SAN

CONFIGURED = build/build.ninja
C_FILES    = $(shell find include src tests tools bench fuzz examples -name '*.[ch]' -o -name '*.cu' -o -name '*.cuh')

.PHONY: all cuda demo test mutants gpu-test bench bench-peer lint format docs fuzz install dist deb clean help

all: $(CONFIGURED)
	@cmake --build build -j $(JOBS)

$(CONFIGURED):
	@scripts/install-deps build
	@cmake --preset release -DSTILL_TESTS=OFF

# nvcc may be installed and not be in the path.
cuda: export PATH := $(PATH):/usr/local/cuda/bin
cuda: build/cuda/build.ninja
	@cmake --build build/cuda -j $(JOBS)

build/cuda/build.ninja:
	@scripts/install-deps build cuda
	@cmake --preset cuda -DSTILL_TESTS=OFF

demo: ; @scripts/demo
test: ; @scripts/test
lint: ; @scripts/lint
fuzz: ; @scripts/test fuzz
mutants: ; @scripts/mutants $(MUTANTS)
gpu-test: ; @scripts/test gpu

bench: all
	@scripts/bench

bench-peer: all
	@bench/peer-llamacpp

format:
	@scripts/install-deps lint
	@clang-format -i $(C_FILES)

docs: all
	@build/still help --markdown > docs/cli.md.new && mv docs/cli.md.new docs/cli.md

install: all
	@cmake --install build --prefix $(PREFIX)
	@# Programs find libstill.so in $(PREFIX)/lib by the linker's cache.
	@if [ -z "$(DESTDIR)" ] && [ "$$(id -u)" = 0 ] && command -v ldconfig >/dev/null; then ldconfig; fi

dist: ; @scripts/dist
deb: ; @scripts/deb

clean:
	@rm -rf build

help:
	@echo 'make             the optimized build, build/still'
	@echo 'make cuda        the same with the CUDA backend, build/cuda/still'
	@echo 'make demo        packages, build, default model, a short run with its figures'
	@echo 'make test        every test: release, sanitizers, fuzz targets, real model'
	@echo '                 SAN=address,undefined or SAN=thread: that build alone'
	@echo '                 OFFLINE=1: leaves out what needs a download'
	@echo 'make gpu-test    builds with CUDA (build/cuda) and tests every operator on the GPU'
	@echo 'make fuzz        each fuzz target for FUZZ_SECONDS=$(FUZZ_SECONDS)'
	@echo 'make mutants     seeds faults one by one; the tests must notice (MUTANTS=NAMES)'
	@echo 'make bench       speed of the default model and of the tokenizer'
	@echo 'make bench-peer  side by side with llama.cpp (builds it once, about 8 minutes)'
	@echo 'make lint        clang-tidy, cppcheck, clang-format, include order, exports'
	@echo 'make format      clang-format over all C files'
	@echo 'make docs        docs/cli.md from the command'"'"'s own tables'
	@echo 'make install     binary, libraries, header, still.pc, CMake package, man page, smollm2-still'
	@echo '                 PREFIX=$(PREFIX) DESTDIR=$(DESTDIR)'
	@echo 'make dist        the source archive, build/still-VERSION.tar.gz'
	@echo 'make deb         Debian packages in build/deb; scripts/check-deb tries them in a chroot'
	@echo 'make clean       removes build/'
