#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Makes the BPF objects again and fails if they are not the ones in the tree.
set -euo pipefail
go=${GO:-go}
# Another release of the compiler makes other code from the same source.
made_by=19.1.7
have=$(clang-19 -dumpversion)

state() { find bpf -type f \( -name '*_bpfel.go' -o -name '*_bpfel.o' \) -exec sha256sum {} + | sort -k 2; }
before=$(state)
"$go" generate ./...
after=$(state)
if [[ $before != "$after" ]]; then
	diff <(echo "$before") <(echo "$after") || true
	[[ $have == "$made_by" ]] ||
		echo "check-generate: the objects were made by clang $made_by, this is clang $have" >&2
	echo "check-generate: the generated files do not match their source: run make generate and commit them" >&2
	exit 1
fi
# What matches on disk may still be missing from the commit.
if ! git diff --exit-code --stat -- bpf; then
	echo "check-generate: files of bpf differ from the commit" >&2
	[[ ${CI:-} == true ]] && exit 1
fi
echo "check-generate: the objects match their source"
