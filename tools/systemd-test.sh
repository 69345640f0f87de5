#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Installs the Debian package under a real systemd and stops services under load: Debian's systemd, nginx and cloud
# kernel, booted by qemu from an initramfs.
#
#	tools/systemd-test.sh
#
# The system is made once, from the Debian mirror of this machine, and kept in $EBB_SYSTEMD_CACHE (~/.cache/ebb-systemd);
# EBB_SYSTEMD_UPDATE=1 makes it anew. EBB_SYSTEMD_TIME is the limit in seconds; EBB_SYSTEMD_ACCEL is what qemu runs on:
# tcg is slow and works everywhere, kvm is fast where it works.
set -euo pipefail

################################################################ inside

# The test itself is process 1's last unit in there: `systemd-test.sh inside`, with all it needs in /ebb.

failures=0 began=$EPOCHSECONDS

# check NAME COMMAND… runs a command, which has to succeed.
check() {
	local name=$1
	shift
	if "$@"; then
		echo "systemd-test: ok: $name ($((EPOCHSECONDS - began)) s)"
	else
		echo "systemd-test: FAILED: $name"
		failures=$((failures + 1))
		journalctl --no-pager --output=cat --lines=30 --unit=nginx --unit=ebb-agent
	fi
}

# within SECONDS COMMAND… repeats a command until it succeeds.
within() {
	local end=$((SECONDS + $1))
	shift
	until "$@"; do
		((SECONDS < end)) || return 1
		sleep 0.2
	done
}

not() { ! "$@"; }

property() { systemctl show --value --property "$2" "$1"; }

# clean says that a unit has stopped by itself, without a signal that it did not expect.
clean() { [[ $(property "$1" ActiveState) == inactive && $(property "$1" Result) == success ]]; }

# drained N says that nginx has drained N times so far because somebody asked for it, each time to the end.
drained() {
	local log
	log=$(journalctl --no-pager --output=cat --unit=ebb-agent | grep '"msg":"drain ended"')
	(($(grep -c '"cause":"operator","outcome":"drained"' <<<"$log") == $1 && $(wc -l <<<"$log") == $1))
}

# serving NAME… says that ebb has found these backends, and that they serve.
serving() {
	local name
	for name in "$@"; do
		ebb status "$name" 2>/dev/null | grep -q serving || return 1
	done
}

# under_load VERB lets a balancer notice that nginx leaves while `systemctl VERB nginx` runs: for five seconds more it
# still sends to it. Prints how many requests have failed.
under_load() {
	local report=/run/report.json
	mkfifo /run/load
	/ebb/load -target nginx=127.0.0.1:80 -target green=127.0.0.1:8081 -rate 20 -keep-alive 2 -gap 100ms \
		-slow 2 -slow-path /slow -drain 5s </run/load >"$report" 2>/run/load.log &
	local load=$!
	exec 7>/run/load
	sleep 4 # of load before, which nothing waits for: it is what is measured
	echo "drop nginx" >&7
	systemctl "$1" nginx
	sleep 2
	echo stop >&7
	exec 7>&-
	wait "$load" || true
	rm /run/load
	cat /run/load.log >&2
	awk -F '[:,]' '/^  "(requests|ok|failed|abandoned)"/ { gsub(/[" ]/, ""); print "systemd-test: load: " $1 ": " $2 }' "$report" >&2
	awk -F '[:,]' '/^  "failed"/ { print $2 + 0 }' "$report"
}

# fetch PATH FILE gets a page of port 80 as slowly as it comes.
fetch() {
	exec 8<>/dev/tcp/127.0.0.1/80
	printf 'GET %s HTTP/1.0\r\n\r\n' "$1" >&8
	cat <&8 >"$2"
}

relay() { systemctl list-units --plain --no-legend --state=running 'ebb-relay-*.scope' | awk '{ print $1 }'; }

relayed() { [[ -n $(relay) ]]; }

# back OLD says that there is another agent than process OLD, and that it answers.
back() { [[ $(property ebb-agent MainPID) != "$1" ]] && ebb status nginx 2>/dev/null | grep -q draining; }

# each_stops says whether two ExecStop= that together take longer than TimeoutStopSec= end well.
each_stops() { systemctl start each && systemctl stop each && clean each; }

# as_before says that nginx's unit is Debian's.
as_before() { [[ ! -e /etc/systemd/system/nginx.service.d && $(property nginx TimeoutStopUSec) == 5s ]]; }

inside() {
	export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
	local failed scope pid
	systemctl --version | head -1
	systemctl stop nginx
	cp /ebb/site /etc/nginx/sites-enabled/default
	cp /ebb/*.service /etc/systemd/system/
	mkdir -p /ebb/www
	head -c 32768 /dev/zero | tr '\0' x >/ebb/www/slow
	head -c 262144 /dev/zero | tr '\0' x >/ebb/www/slower
	echo hello >/ebb/www/index.html

	# The package.
	check "the package installs" dpkg --install /ebb/ebb.deb
	check "its unit is enabled" systemctl is-enabled --quiet ebb-agent
	check "its unit has no mistake" systemd-analyze verify ebb-agent.service
	check "there is the group ebb" getent group ebb
	check "and the user ebb-front" getent passwd ebb-front
	check "its configuration is a good one" ebb agent --check-config --config /etc/ebb/agent.yaml
	cp /ebb/agent.yaml /etc/ebb/agent.yaml
	check "it upgrades" dpkg --install /ebb/ebb.deb
	check "and keeps the configuration" cmp /ebb/agent.yaml /etc/ebb/agent.yaml
	systemctl start green

	# What a stop costs without.
	systemctl stop ebb-agent
	systemctl start nginx
	failed=$(under_load stop)
	check "without ebb a stop loses requests ($failed)" test "$failed" -gt 0

	# With it.
	check "the agent starts" systemctl start ebb-agent
	check "it may pin its programs" test -d /sys/fs/bpf/ebb
	check "enable" ebb systemd enable nginx --grace 30s
	check "to enable again changes nothing" grep -q "nothing to change" <(ebb systemd enable nginx --grace 30s)
	check "the manager has read it" test "$(property nginx TimeoutStopUSec)" = 40s
	systemctl start nginx
	check "both are found" within 60 serving nginx green
	failed=$(under_load stop)
	check "with ebb a stop loses none ($failed)" test "$failed" = 0
	check "nginx has drained" within 30 drained 1
	check "its stop was a clean one" clean nginx
	systemctl start nginx
	check "it is found again" within 60 serving nginx green
	pid=$(property nginx MainPID)
	failed=$(under_load restart)
	check "with ebb a restart loses none ($failed)" test "$failed" = 0
	check "nginx has drained again" within 30 drained 2
	check "it was a restart" test "$(property nginx MainPID)" != "$pid"

	# A relay outlives who started it.
	echo "nonsense: 1" >/etc/ebb/agent.yaml
	check "a bad configuration is refused" not systemctl reload ebb-agent
	cp /ebb/relay.yaml /etc/ebb/agent.yaml
	check "a good one is taken over" systemctl reload ebb-agent
	check "nginx serves" within 60 serving nginx
	fetch /slower /run/own & # keeps nginx from leaving at once
	check "nginx answers" within 60 test -s /run/own
	ebb drain nginx --on-new relay
	check "the relay runs in a scope of its own" within 60 relayed
	scope=$(relay)
	fetch /slow /run/late &
	check "it carries" within 60 test -s /run/late
	pid=$(property ebb-agent MainPID)
	check "the agent restarts" systemctl restart ebb-agent
	check "it goes on with the drain" within 60 back "$pid"
	check "the relay is the same" test "$(relay)" = "$scope"
	wait %2 || true
	check "what it carried is whole" test "$(tail -c 32768 /run/late | tr -d '\n' | tr -s x)" = x
	check "and nginx was not touched" kill %1
	ebb cut nginx || true

	# Nobody there to drain.
	systemctl stop ebb-agent
	systemctl restart nginx
	SECONDS=0
	check "a stop without an agent" systemctl stop nginx
	check "is not held up (${SECONDS} s)" test "$SECONDS" -lt 15
	check "and clean" clean nginx
	check "TimeoutStopSec= counts for each ExecStop=" each_stops

	# All goes again.
	check "disable" ebb systemd disable nginx
	check "the unit is as before" as_before
	systemctl start ebb-agent
	check "the package can be removed" dpkg --remove ebb
	check "its configuration stays" test -e /etc/ebb/agent.yaml
	check "and be purged" dpkg --purge ebb
	check "nothing is left" not ls -d /etc/ebb /var/lib/ebb /run/ebb /sys/fs/bpf/ebb
	echo "systemd-test: done, $failures failed"
	systemctl poweroff --force --no-block
}

if [[ ${1:-} == inside ]]; then
	inside
	exit 0
fi

################################################################ outside

cd "$(dirname "$0")/.."
go=${GO:-go}
cache=${EBB_SYSTEMD_CACHE:-$HOME/.cache/ebb-systemd}
limit=${EBB_SYSTEMD_TIME:-900}
accel=${EBB_SYSTEMD_ACCEL:-tcg,thread=multi}
suite=bookworm

die() {
	echo "systemd-test: $*" >&2
	exit 1
}

[[ $(uname -m) == x86_64 ]] || die "the kernel is an x86_64 one, this machine is $(uname -m)"

# make_system makes base.cpio, a Debian with systemd and nginx, and its kernel.
make_system() {
	local work mirror release
	work=$(mktemp -d "$cache/make.XXXXXX")
	# The mirror that this machine uses for Debian, if it does.
	mirror=$(cat /etc/apt/sources.list /etc/apt/sources.list.d/* 2>/dev/null | grep -oE 'https?://[^ ]+/debian/?( |$)' | head -1 || true)
	mirror=${mirror:-http://deb.debian.org/debian}
	echo "systemd-test: making a Debian $suite from ${mirror% }"
	# What apt-get downloads inside the hook is of the suite, whatever this machine runs.
	# shellcheck disable=SC2016 # expanded by the hook
	mmdebstrap --quiet --variant=minbase --include=systemd-sysv,nginx-light,kmod \
		--dpkgopt='path-exclude=/usr/share/man/*' --dpkgopt='path-exclude=/usr/share/doc/*' --dpkgopt='path-exclude=/usr/share/locale/*' \
		--customize-hook='export APT_CONFIG=$MMDEBSTRAP_APT_CONFIG; cd "$1/.." && apt-get -q=2 download "$(apt-cache depends linux-image-cloud-amd64 | awk '\''$1 == "Depends:" { print $2; exit }'\'')"' \
		"$suite" "$work/root" "${mirror% }" || die "mmdebstrap: see above"
	dpkg-deb -x "$work"/linux-image-*.deb "$work/kernel"
	release=$(ls "$work/kernel/lib/modules")
	# Of the modules only those that sock_diag asks for; the console, the network and virtio need none.
	local modules=$work/root/lib/modules/$release
	mkdir -p "$modules/kernel"
	find "$work/kernel/lib/modules/$release/kernel/net" -name '*_diag.ko*' -exec cp {} "$modules/kernel/" \;
	cp "$work/kernel/lib/modules/$release"/modules.{order,builtin,builtin.modinfo} "$modules/"
	depmod -b "$work/root" "$release"
	rm -rf "$work"/root/var/{lib/apt/lists,cache/apt}/*
	(cd "$work/root" && find . -print0 | cpio --null --quiet -o -H newc) >"$work/base.cpio"
	mv "$work/base.cpio" "$cache/base.cpio"
	mv "$work/kernel/boot/vmlinuz-$release" "$cache/vmlinuz" # the last one: it says that all is there
	rm -rf "$work"
}

mkdir -p "$cache"
if [[ ! -f $cache/vmlinuz || -n ${EBB_SYSTEMD_UPDATE:-} ]]; then
	make_system
fi

build=$(mktemp -d)
trap 'rm -rf "$build"' EXIT
top=$build/top
mkdir -p "$top/ebb" "$top/etc/systemd/system/multi-user.target.wants"
deploy/deb/build.sh "$build" 2>/dev/null
mv "$build"/ebb_*.deb "$top/ebb/ebb.deb"
(cd tools && CGO_ENABLED=0 "$go" build -o "$top/ebb/load" ./load)
cp tools/systemd-test.sh "$top/ebb/test"

cat >"$top/ebb/site" <<'END'
server {
	listen 80 default_server;
	root /ebb/www;
	location /slow { limit_rate 4k; }
}
END
cat >"$top/ebb/green.conf" <<'END'
pid /run/green.pid;
error_log stderr;
events {}
http {
	access_log off;
	server {
		listen 8081;
		root /ebb/www;
		location /slow { limit_rate 4k; }
	}
}
END
cat >"$top/ebb/green.service" <<'END'
[Service]
ExecStart=/usr/sbin/nginx -c /ebb/green.conf -g 'daemon off;'
END
cat >"$top/ebb/each.service" <<'END'
[Service]
Type=oneshot
RemainAfterExit=yes
ExecStart=/bin/true
ExecStop=/bin/sleep 6
ExecStop=/bin/sleep 6
TimeoutStopSec=10
END
cat >"$top/ebb/agent.yaml" <<'END'
mode: enforce
services:
  - name: web
    protocol: http1
    backends:
      - {name: nginx, match: {unit: nginx.service}}
      - {name: green, match: {unit: green.service}}
END
cat >"$top/ebb/relay.yaml" <<'END'
mode: enforce
services:
  - name: web
    protocol: http1
    grace: 3m
    backends:
      - {name: nginx, match: {unit: nginx.service}}
      - {name: elsewhere, address: "127.0.0.1:8081"}
END
chmod 755 "$top/ebb/test"
cat >"$top/etc/systemd/system/ebb-test.service" <<'END'
[Unit]
After=nginx.service
[Service]
ExecStart=/ebb/test inside
ExecStopPost=/bin/systemctl poweroff --force --no-block
StandardOutput=tty
StandardError=tty
TTYPath=/dev/ttyS0
END
ln -s ../ebb-test.service "$top/etc/systemd/system/multi-user.target.wants/ebb-test.service"
# The kernel unpacks one archive after the other.
(cat "$cache/base.cpio" && cd "$top" && find . -mindepth 1 -print0 | cpio --null --quiet -o -H newc) >"$build/initramfs"

echo "systemd-test: booting"
log=$build/log
timeout "$limit" qemu-system-x86_64 -M q35 -accel "$accel" -cpu max -smp 2 -m 2048 -nodefaults -no-user-config \
	-display none -serial stdio -no-reboot -kernel "$cache/vmlinuz" -initrd "$build/initramfs" \
	-append "console=ttyS0 panic=-1 quiet loglevel=5 rdinit=/sbin/init systemd.show_status=0 systemd.log_color=0" \
	</dev/null 2>&1 | stdbuf -oL tr -d '\r' | tee "$log" | grep --line-buffered '^systemd-test: ' ||
	echo "systemd-test: qemu ended early: the limit is $limit s"
if ! grep -qx 'systemd-test: done, 0 failed' "$log"; then
	cat "$log"
	die "failed"
fi
