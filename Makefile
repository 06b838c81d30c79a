# SPDX-License-Identifier: GPL-2.0-or-later
# Everything a user or a contributor runs, one line each: `make help`.
# The recipes are scripts/*; this file only says what comes before what.

PREFIX ?= /usr/local
DESTDIR ?=
# make bench SCENARIOS="spiky steady" ARGS="--seed 7"
SCENARIOS ?=
ARGS ?=
# make kernel-deb CONFIG=/boot/config-6.12.0-amd64
CONFIG ?=

CARGO = scripts/cargo
# The lab's emulator (rattan-env 0.1.1) takes C's char for signed, so the lab compiles on x86-64 only.
CRATES = $(if $(filter x86_64,$(shell uname -m)),--workspace,--package mountain)

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help setup setup-bench setup-test preflight build demo test bench lint docs check install uninstall deb clean
.PHONY: setup-kernel kernel kernel-deb kernel-test kernel-test-quick kernel-shell

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-17s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo
	@echo "  PREFIX=$(PREFIX) and DESTDIR= apply to install and uninstall."

setup: ## install what building and the lab need (apt; Rust only if too old)
	@scripts/setup

setup-bench:
	@scripts/setup --bench

setup-test:
	@scripts/setup --test

preflight:
	@scripts/preflight $(MAKECMDGOALS)

build: ## build target/release/mountain and, on x86-64, mountain-lab
	$(CARGO) build --release --locked $(CRATES)

demo: preflight setup build ## (root) compare policies on two emulated uplinks, write report/index.html
	@scripts/demo $(ARGS)

test: preflight setup-test lint ## (root) lint, build and run every test
	@scripts/test $(ARGS)

bench: preflight setup-bench build ## (root) run every scenario and bench against its figures, into out/bench/
	@scripts/bench $(SCENARIOS) -- $(ARGS)

lint: ## formatting, clippy and shellcheck
	@scripts/lint

docs: ## the documentation as a book, out/book/index.html (mdBook)
	@scripts/setup --docs
	@scripts/docs

check: lint ## the same as lint: what needs no root

install: build ## install the program, systemd units, completions and sample configuration
	@packaging/install "$(DESTDIR)" "$(PREFIX)"

uninstall: ## remove what install put there; your configuration stays
	@packaging/install --remove "$(DESTDIR)" "$(PREFIX)"

deb: build ## build a Debian package into out/
	@packaging/build-deb

setup-kernel:
	@scripts/setup --kernel

kernel: setup-kernel ## fetch, patch and build the kernel edition for the tests, into target/kernel/
	@kernel/scripts/build

kernel-deb: ## the kernel edition as Debian packages: make kernel-deb CONFIG=/boot/config-...
	@[ -n "$(CONFIG)" ] || { echo 'error: which configuration? make kernel-deb CONFIG=/boot/config-$$(uname -r)' >&2; exit 1; }
	@[ -r "$(CONFIG)" ] || { echo 'error: cannot read $(CONFIG)' >&2; exit 1; }
	@scripts/setup --kernel-deb
	@kernel/scripts/deb "$(CONFIG)"

kernel-test: setup-kernel ## boot stock and patched kernel in QEMU and run all kernel tests
	@kernel/scripts/test $(ARGS)
	@[ -n "$(ARGS)" ] || tests/kernels/bbr-off

kernel-test-quick: setup-kernel ## the patched kernel only
	@kernel/scripts/test --quick $(ARGS)

kernel-shell: setup-kernel ## a shell on the patched kernel, in QEMU
	@kernel/scripts/shell $(ARGS)

clean: ## remove build results, reports and bench results
	rm -rf target report out
