#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Runs tests on other kernels: Debian's cloud kernels, booted by qemu with an initramfs that holds
# nothing but the test binaries.
#
#	tools/kernels.sh VERSION…     (5.10, 6.1)
#
# Packages come from the Debian mirror of this machine, by an apt directory of their own, and are kept
# in $EBB_KERNEL_CACHE (~/.cache/ebb-kernels); EBB_KERNEL_UPDATE=1 fetches them anew. EBB_KERNEL_RUN is
# a pattern for -test.run, EBB_KERNEL_TIME the limit of one kernel in seconds, EBB_KERNEL_ACCEL what qemu
# runs on: tcg is slow and works everywhere, kvm is fast where it works.
set -euo pipefail
cd "$(dirname "$0")/.."
go=${GO:-go}
cache=${EBB_KERNEL_CACHE:-$HOME/.cache/ebb-kernels}
limit=${EBB_KERNEL_TIME:-600}
accel=${EBB_KERNEL_ACCEL:-tcg,thread=multi}
# The tests of these packages need no program beside the shell's; they run with -test.short.
packages=(./bpf ./internal/netns ./internal/e2e)
# Of some only what needs no server but Go's and is not measured in minutes here.
declare -A patterns=([./internal/e2e]='^TestC1_LateConnectionsOnThisKernel$')
# In the order of loading; what a kernel has built in or does not have is left out.
modules=(inet_diag tcp_diag udp_diag unix_diag mptcp_diag veth sch_ingress cls_bpf)

declare -A suites=([5.10]=bullseye [6.1]=bookworm)

die() {
	echo "kernels: $*" >&2
	exit 1
}

[[ $(uname -m) == x86_64 ]] || die "the kernels are x86_64 ones, this machine is $(uname -m)"

# sources prints the lines of a suite, for the mirrors and keyrings that this machine uses for Debian.
sources() {
	local suite=$1 file
	local keyring=/usr/share/keyrings/debian-archive-keyring.gpg
	for file in /etc/apt/sources.list /etc/apt/sources.list.d/*.list /etc/apt/sources.list.d/*.sources; do
		[[ -r $file ]] || continue
		awk '/^deb / { for (i = 2; i <= NF; i++) if ($i ~ /^[a-z+]+:\/\//) print $i } /^URIs:/ { for (i = 2; i <= NF; i++) print $i }' "$file"
	done | sort -u | while read -r uri; do
		case ${uri%/} in
		*/debian) echo "deb [signed-by=$keyring] $uri $suite main" ;;
		*/debian-security) echo "deb [signed-by=$keyring] $uri $suite-security main" ;;
		esac
	done
}

# fetch puts vmlinuz, the modules and a static busybox of a suite into a directory.
fetch() {
	local version=$1 dir=$2 suite=${suites[$1]} work image
	work=$(mktemp -d "$cache/fetch.XXXXXX")
	mkdir -p "$work"/{lists/partial,archives/partial,state,debs}
	touch "$work/state/status"
	sources "$suite" >"$work/sources.list"
	[[ -s $work/sources.list ]] || die "this machine's apt has no Debian mirror to take $suite from"
	local apt=(
		-o "Dir::Etc::sourcelist=$work/sources.list" -o Dir::Etc::sourceparts=- -o "Dir::State=$work/state"
		-o "Dir::State::status=$work/state/status" -o "Dir::State::lists=$work/lists" -o "Dir::Cache=$work"
		-o "Dir::Cache::archives=$work/archives" -o APT::Sandbox::User=root -o Acquire::Languages=none
		-o Acquire::Check-Valid-Until=false -o APT::Architecture=amd64 -o APT::Architectures=amd64
	)
	echo "kernels: fetching $version from $suite"
	apt-get "${apt[@]}" -q=2 update || die "apt-get update for $suite: see above"
	# The metapackage names the newest build.
	image=$(apt-cache "${apt[@]}" depends linux-image-cloud-amd64 | awk '$1 == "Depends:" { print $2; exit }')
	[[ $image == linux-image-"$version".* ]] || die "$suite has ${image:-no kernel}, not $version"
	(cd "$work/debs" && apt-get "${apt[@]}" -q=2 download "$image" busybox-static) || die "apt-get download $image: see above"
	local deb
	for deb in "$work"/debs/*.deb; do
		dpkg-deb -x "$deb" "$work/root"
	done
	local release
	release=$(cd "$work/root/lib/modules" && ls)
	depmod -b "$work/root" "$release"
	mkdir "$work/out"
	cp "$work/root/boot/vmlinuz-$release" "$work/out/vmlinuz"
	cp "$work/root/bin/busybox" "$work/out/busybox"
	cp -r "$work/root/lib/modules/$release" "$work/out/modules"
	echo "$release" >"$work/out/release"
	rm -rf "$dir"
	mv "$work/out" "$dir"
	rm -rf "$work"
}

# closure prints the files of the wanted modules and of what they need, what is needed first.
closure() {
	local dir=$1
	awk -F '[: ]+' -v wanted="${modules[*]}" '
		{ n = $1; sub(/.*\//, "", n); sub(/\.ko.*/, "", n); gsub("-", "_", n); path[n] = $1; line[$1] = $0 }
		function load(file, parts, i, n) {
			if (seen[file]++) return
			n = split(line[file], parts, /[: ]+/)
			for (i = n; i > 1; i--) if (parts[i] != "") load(parts[i])
			print file
		}
		END { n = split(wanted, w, " "); for (k = 1; k <= n; k++) if (w[k] in path) load(path[w[k]]) }
	' "$dir/modules/modules.dep"
}

# pack makes the initramfs.
pack() {
	local dir=$1 out=$2 root=$3 n=0 file base
	mkdir -p "$root"/{bin,dev,modules,proc,sys,tmp,run}
	cp "$build/kernelinit" "$root/init"
	cp "$dir/busybox" "$build/ebb" "$root/bin/"
	cp -r "$build/tests" "$root/tests"
	while read -r file; do
		base=$(printf '%03d-%s' "$n" "$(basename "$file")")
		cp "$dir/modules/$file" "$root/modules/$base"
		case $base in
		*.xz) xz -dq "$root/modules/$base" ;;
		*.zst) zstd -dq --rm "$root/modules/$base" ;;
		esac
		n=$((n + 1))
	done < <(closure "$dir")
	(cd "$root" && find . -print0 | cpio --null --quiet -o -H newc | gzip -1) >"$out"
}

mkdir -p "$cache"
build=$(mktemp -d)
trap 'rm -rf "$build"' EXIT
(cd tools && CGO_ENABLED=0 "$go" build -o "$build/kernelinit" ./kernelinit && "$go" build -o "$build/testsum" ./testsum)
for package in "${packages[@]}"; do
	name=${package#./}
	mkdir -p "$build/tests/$name"
	CGO_ENABLED=0 "$go" test -c -o "$build/tests/$name/test" "$package"
	[[ -f $build/tests/$name/test ]] || die "$package has no tests"
	if [[ -d $package/testdata ]]; then
		cp -r "$package/testdata" "$build/tests/$name/"
	fi
	if [[ -n ${patterns[$package]:-} ]]; then
		echo "${patterns[$package]}" >"$build/tests/$name/run"
	fi
done
CGO_ENABLED=0 "$go" build -o "$build/ebb" ./cmd/ebb

status=0
for version in "$@"; do
	[[ -n ${suites[$version]:-} ]] || die "unknown version $version: have ${!suites[*]}"
	dir=$cache/$version
	if [[ ! -f $dir/release || -n ${EBB_KERNEL_UPDATE:-} ]]; then
		fetch "$version" "$dir"
	fi
	echo "kernels: booting $(<"$dir/release")"
	pack "$dir" "$build/initramfs-$version.gz" "$build/root-$version"
	log=$build/log-$version
	begin=$SECONDS
	timeout "$limit" qemu-system-x86_64 -M q35 -accel "$accel" -cpu max -smp 2 -m 1536 -nodefaults -no-user-config \
		-display none -serial stdio -no-reboot -kernel "$dir/vmlinuz" -initrd "$build/initramfs-$version.gz" \
		-append "console=ttyS0 panic=-1 quiet loglevel=5 ${EBB_KERNEL_RUN:+ebb_run=$EBB_KERNEL_RUN}" \
		</dev/null 2>&1 | tr -d '\r' >"$log" || echo "kernels: qemu ended early: the limit is $limit s" >>"$log"
	# A test binary that never ran must not pass unseen.
	failed=false
	for package in "${packages[@]}"; do
		name=${package#./}
		grep -qx "kernelinit: $name: exit 0" "$log" || failed=true
	done
	if grep -qE '^(\[[ 0-9.]+\] )?(BUG:|WARNING:|Oops|Kernel panic)' "$log"; then
		failed=true
	fi
	if [[ $failed == true ]]; then
		cat "$log"
		status=1
	else
		grep -E '^\s*--- SKIP|_test\.go:[0-9]+: (needs|skip)' "$log" || true
	fi
	printf 'kernels: %s: %d passed, %d failed, %d skipped in %d s\n' "$(<"$dir/release")" \
		"$(grep -c '^ *--- PASS' "$log" || true)" "$(grep -c '^ *--- FAIL' "$log" || true)" \
		"$(grep -c '^ *--- SKIP' "$log" || true)" $((SECONDS - begin))
done
if ((status != 0)); then
	echo "kernels: failed" >&2
fi
exit "$status"
