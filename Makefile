# SPDX-License-Identifier: Apache-2.0
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

# Under sudo the PATH often lacks the place of Go; the PATH that it has comes first.
export PATH := $(PATH):/usr/local/go/bin:/usr/lib/go-1.26/bin:/snap/bin
export GO ?= go
setup := tools/setup.sh
root := $(filter 0,$(shell id -u))

# describe is empty without git or a tag-less clone, and so the version then says what it is: a build of a tree.
version := $(or $(shell git describe --tags --always --dirty 2>/dev/null),unknown)
commit := $(or $(shell git rev-parse HEAD 2>/dev/null),unknown)
ldflags := -X main.version=$(version) -X main.commit=$(commit)

# Root tests share the kernel: one package at a time keeps their loads apart.
testflags := -race -timeout 30m $(if $(root),-p 1)
# Modules of their own: what they need is nobody else's dependency.
modules := tools client/grpc
FUZZTIME ?= 30s
KERNELS ?= 5.10 6.1
scripts = .ci/run $(wildcard tools/*.sh) $(shell git ls-files '*.sh' 2>/dev/null)

.PHONY: help build demo test bench bench-relay full kernels systemd-test deb generate check-generate lint fuzz ci

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "%-16s%s\n", $$1, $$2 }' $(MAKEFILE_LIST)

build: ## make bin/ebb; needs Go alone
	@command -v $(GO) >/dev/null || { echo 'make: Go is missing: install Go 1.26 or later'; exit 1; }
	@# Without cgo it is static, and an agent has 3 MiB less resident.
	CGO_ENABLED=0 $(GO) build -trimpath -buildvcs=false -ldflags '$(ldflags)' -o bin/ebb ./cmd/ebb
	@# What sudo built must not be in the way of the next build without it.
	@[[ -z $${SUDO_UID:-} ]] || chown -R "$$SUDO_UID:$$SUDO_GID" bin

demo: build ## show the main job on this machine (root)
	@$(setup) mounts
	./bin/ebb demo

test: build ## run the tests, as root all of them
	@$(setup) race 'test?' mounts
	@$(if $(root),,echo 'make: not root: tests that need it are skipped')
	$(GO) build -race ./...
	$(GO) test $(testflags) -json ./... | (cd tools && $(GO) run ./testsum -last ../bin/tests.txt)
	@for m in $(modules); do (cd "$$m" && $(GO) test $(testflags) ./...); done

chaos: build ## kill, stop and replace agents at random under load (root; DURATION=60s SEED=…)
	@$(setup) test mounts
	EBB_CHAOS=$(or $(DURATION),60s) EBB_SEED=$(SEED) $(GO) test -race -timeout 0 -count 1 -v -run 'TestD3_Chaos' ./internal/e2e

full: build ## run the long versions of the tests (root) and keep their results under docs/results
	@$(setup) test mounts
	@mkdir -p docs/results
	tools/full.sh docs/results

bench: build ## measure what Ebb costs, side by side with nothing (root; BENCHFLAGS='-rounds 100 -write ../docs/benchmarks')
	@$(setup) mounts
	cd tools && $(GO) run ./bench -ebb ../bin/ebb $(BENCHFLAGS)

bench-relay: ## measure the relay beside HAProxy and nginx (root; BENCHFLAGS='-write ../docs/benchmarks')
	@$(setup) relays
	cd tools && $(GO) run ./benchrelay $(BENCHFLAGS)

kernels: ## run the tests of bpf on other kernels under qemu
	@$(setup) kernels
	tools/kernels.sh $(KERNELS)

systemd-test: ## install the Debian package and stop nginx under load in a real systemd, under qemu (root once, to make its system)
	@$(setup) systemd
	tools/systemd-test.sh

deb: ## make the Debian package bin/ebb_VERSION_ARCH.deb; needs Go and git
	deploy/deb/build.sh bin

generate: ## make the BPF objects again from their source
	@$(setup) generate
	$(GO) generate ./...

check-generate: ## check that the BPF objects are what their source makes
	@$(setup) generate
	tools/check-generate.sh

lint: ## check format, vet, fixes, modules, staticcheck, vulnerabilities, BPF C and scripts
	@$(setup) lint
	@echo 'lint: gofmt'; files=$$(gofmt -l .); [[ -z $$files ]] || { echo "gofmt these: $$files"; exit 1; }
	staticcheck=$$(cd tools && $(GO) tool -n staticcheck); for m in . $(modules); do (cd "$$m" && \
		$(GO) vet ./... && $(GO) fix -diff ./... && $(GO) mod tidy -diff && "$$staticcheck" ./...); done
	cd tools && $(GO) run ./vulncheck .. . ../client/grpc
	clang-format-19 --dry-run -Werror bpf/*.c bpf/*.h
	shellcheck $(sort $(scripts))
	@echo 'lint: promtool'; find $(wildcard deploy) docs -name '*.rules.y*ml' -print0 | xargs -0 -r promtool check rules
	find deploy -name '*.rules.test.y*ml' -print0 | xargs -0 -r promtool test rules

fuzz: ## run each fuzz target for FUZZTIME (30s)
	tools/fuzz.sh $(FUZZTIME)

# The commands of the README are among these. The quick ones come first.
ci: ## everything that a change must pass (root)
	$(MAKE) build
	$(MAKE) lint
	$(MAKE) check-generate
	$(MAKE) demo
	$(MAKE) test
	$(MAKE) fuzz FUZZTIME=5s
	$(MAKE) kernels
	@cat bin/tests.txt
