#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Gives a server that knows nothing of Ebb a session, with bash and curl alone.
#
#	run.sh READY SERVER [ARG…]
#
# READY is a file that the server serves and that a health check asks for: it is there while the server is ready. Each file in
# READY.jobs is a job that a flush waits for, if its name needs no quoting. The protocol is docs/protocol.md.
set -uo pipefail
ready=$1 jobs=$1.jobs
shift
socket=${EBB_APP_SOCKET:-/run/ebb/app.sock}
# Each request comes from another process, so that the session has to be named. It cannot be bound to one of them either.
session='' applied=0 seen=' ' odd=''

# call PATH [BODY] sends a POST and prints the answer, or of a failure the kind of its problem.
call() {
	local answer
	answer=$(curl -sS -m 5 --unix-socket "$socket" -H 'Content-Type: application/json' ${session:+-H "Ebb-Session: $session"} \
		-d "${2:-{\}}" -w '\n%{http_code}' "http://ebb/v1/session$1" 2>/dev/null)
	if [[ ${answer##*$'\n'} == 2* ]]; then
		echo "$answer"
	else
		answer=$(member type "$answer")
		echo "${answer##*:}"
		return 1
	fi
}

# member NAME JSON prints a member of an object whose value is text or a number.
member() { sed -nE "s/.*\"$1\": *\"?([^\",}]*).*/\1/p" <<<"${2//$'\n'/ }" | head -n 1; }

# beat gives a sign of life, takes a lease for each job that has none, and gives back those of jobs that are over.
beat() {
	local there held job
	there=$(call /heartbeat) || return
	held=$(grep -oE '"id": *"[^"]+"' <<<"$there" | cut -d '"' -f 4)
	for job in "$jobs"/*; do
		job=${job##*/}
		if [[ $job == *[!A-Za-z0-9._-]* || ${#job} -gt 128 ]]; then
			[[ $odd == *"/$job/"* ]] || { odd+="/$job/" && echo "job ${job@Q} holds nothing: want up to 128 letters, digits and . _ -"; }
		elif ! grep -qxF -e "$job" <<<"$held"; then
			call /hold "{\"name\":\"$job\"}" >/dev/null
		fi
	done
	for job in $held; do
		[[ -e $jobs/$job ]] || call /release "{\"id\":\"$job\"}" >/dev/null
	done
}

# apply KIND SEQ DATA does what an event says, once, and then acknowledges it.
apply() {
	local drain
	drain=$(member drain "$3")
	if (($2 > applied)); then
		if [[ $1 == deadline || $seen != *" $drain-$1 "* ]]; then
			seen+="$drain-$1 "
			case $1 in
			draining) rm -f "$ready" && echo "draining $(member cause "$3")" ;;
			cancelled) : >"$ready" && echo cancelled ;;
			flush) sync && echo "flush $(member reason "$3")" ;; # what this one has to write
			esac
		fi
		applied=$2
	fi
	# A repeated flush is answered too: the first answer may be lost.
	[[ $1 != flush ]] || call /flushed "{\"drain\":\"$drain\"}" >/dev/null
	call /ack "{\"seq\":$applied}" >/dev/null
	[[ $1 != flush ]] || kill -TERM "$server"
}

# follow applies events until the stream ends, and sets end to the reason that it gave. Not even a beat for 15 s ends it too.
follow() {
	local kind='' seq=0 data='' line
	while IFS= read -r line; do
		pause=0
		case $line in
		'event: '*) kind=${line#event: } ;;
		'id: '*) seq=${line#id: } ;;
		'data: '*) data=${line#data: } ;;
		'')
			((seq == 0)) || apply "$kind" "$seq" "$data"
			[[ $kind != end ]] || end=$(member reason "$data")
			kind='' seq=0 data=''
			;;
		esac
	done < <(exec curl -sSfN --speed-limit 1 --speed-time 15 --unix-socket "$socket" -H "Ebb-Session: $session" \
		http://ebb/v1/session/events 2>/dev/null)
}

# keep keeps up the session, until this generation is over.
keep() {
	local pause=0 end answer beats me=$BASHPID
	while :; do
		if [[ -n $session ]] && [[ $(call /heartbeat) == unknown-session ]]; then
			session=''
		fi
		if [[ -z $session ]] && answer=$(call ''); then
			session=$(member session "$answer") applied=0
			echo "$session" >"$known"
			echo "session $session"
		fi
		end=broken
		if [[ -n $session ]]; then
			while kill -0 "$me" 2>/dev/null; do beat; sleep 1; done &
			beats=$!
			follow
			kill "$beats"
		fi
		[[ $end != evicted ]] || return
		# At once when it was there until now, else after 1 s, doubling to 30 s.
		[[ $end != transient || $pause != 0 ]] || pause=1
		sleep "$pause" &
		wait $!
		pause=$((pause == 0 ? 1 : pause < 15 ? 2 * pause : 30))
	done
}

known=$(mktemp)
mkdir -p "$jobs"
shopt -s nullglob
"$@" &
server=$!
: >"$ready"
keep &
keeper=$!
trap 'rm -f "$ready"; kill -TERM "$server"' TERM
while kill -0 "$server" 2>/dev/null; do
	wait "$server"
	code=$?
done
kill -TERM "$keeper" 2>/dev/null && wait "$keeper" 2>/dev/null
# The session says goodbye, so that nothing is thought of the silence that follows.
session=$(<"$known")
rm -f "$known"
[[ -z $session ]] || curl -s -m 5 --unix-socket "$socket" -X DELETE -H "Ebb-Session: $session" http://ebb/v1/session >/dev/null
exit "$code"
