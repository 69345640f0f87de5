#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Installs the system packages that a make target needs and that are not there, and says so.
#
#	tools/setup.sh GROUP…
#
# Groups: test, lint, generate, kernels, relays, mounts. Needs Debian or Ubuntu, and root if something is missing;
# without root it prints the command to run. A group with a trailing ? may stay incomplete.
set -euo pipefail

# As pinned as Debian and Ubuntu allow: what changes its output with its version carries it in its name.
declare -A groups=(
	[race]="gcc libc6-dev"
	[test]="gcc libc6-dev curl haproxy iproute2 libnginx-mod-http-echo libnginx-mod-stream nghttp2-client nginx nodejs openssl procps prometheus python3 util-linux wrk"
	[lint]="clang-format-19 prometheus shellcheck"
	[generate]="clang-19 libbpf-dev llvm-19"
	[relays]="haproxy libnginx-mod-stream nginx"
	[kernels]="cpio dpkg gzip kmod qemu-system-x86 xz-utils zstd"
	[systemd]="cpio dpkg kmod mmdebstrap qemu-system-x86"
)
# Installing these starts a service, which would take a port of the machine; only the program is wanted.
services="haproxy nginx prometheus"

installed() {
	[[ $(dpkg-query -W -f '${db:Status-Status}' "$1" 2>/dev/null) == installed ]]
}

# mounts makes what root tests need of the kernel's file systems.
mounts() {
	((EUID == 0)) || return 0
	if ! awk '$3 == "bpf" && $2 == "/sys/fs/bpf" { found = 1 } END { exit !found }' /proc/self/mounts; then
		echo "setup: mounting the BPF file system on /sys/fs/bpf"
		mount -t bpf bpf /sys/fs/bpf
	fi
	if ! awk '{ for (i = 7; i < NF; i++) if ($i == "-" && $(i + 1) == "cgroup2") found = 1 } END { exit !found }' /proc/self/mountinfo; then
		local dir=/run/cgroup2
		echo "setup: mounting cgroup v2 on $dir"
		mkdir -p "$dir"
		mount -t cgroup2 none "$dir"
	fi
}

missing=() optional=true
for group in "$@"; do
	if [[ $group == mounts ]]; then
		mounts
		continue
	fi
	required=true
	if [[ $group == *\? ]]; then
		required=false group=${group%\?}
	fi
	if [[ -z ${groups[$group]:-} ]]; then
		echo "setup: unknown group $group" >&2
		exit 2
	fi
	if ! command -v dpkg-query >/dev/null; then
		echo "setup: this is not Debian or Ubuntu; see to it that you have: ${groups[$group]}" >&2
		continue
	fi
	for package in ${groups[$group]}; do
		installed "$package" && continue
		missing+=("$package")
		[[ $required == false ]] || optional=false
	done
done
((${#missing[@]} > 0)) || exit 0
mapfile -t missing < <(printf '%s\n' "${missing[@]}" | sort -u)

if ((EUID != 0)); then
	echo "setup: missing: ${missing[*]}" >&2
	echo "setup: to install: sudo apt-get install --no-install-recommends ${missing[*]}" >&2
	[[ $optional == true ]] && exit 0
	exit 1
fi

fresh=() policy=/usr/sbin/policy-rc.d
for service in $services; do
	for package in "${missing[@]}"; do
		[[ $package == "$service" ]] && fresh+=("$service")
	done
done
# haproxy and the nginx module bring what starts services too; 101 forbids it, see invoke-rc.d(8).
if [[ ! -e $policy ]]; then
	trap 'rm -f "$policy"' EXIT
	printf '#!/bin/sh\nexit 101\n' >"$policy"
	chmod 755 "$policy"
fi
echo "setup: installing ${missing[*]}"
export DEBIAN_FRONTEND=noninteractive
log=$(mktemp)
install() {
	apt-get install -y -q --no-install-recommends "${missing[@]}" </dev/null >>"$log" 2>&1
}
# The package list of a new machine is empty, and that of an old one may name files that are gone.
if ! install; then
	apt-get update -q </dev/null >>"$log" 2>&1 || true
	if ! install; then
		cat "$log" >&2
		rm -f "$log"
		echo "setup: apt-get install ${missing[*]}: see above" >&2
		exit 1
	fi
fi
rm -f "$log"
if [[ -d /run/systemd/system ]]; then
	for service in "${fresh[@]}"; do
		echo "setup: disabling the service $service, only the program is used"
		systemctl disable --quiet --now "$service" || true
	done
fi
